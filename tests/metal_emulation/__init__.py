"""`mx.fast.metal_kernel` without Metal: the text MLX would generate, compiled by g++ and run on the CPU."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17 -O0 -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wno-attributes -Wno-unknown-pragmas"
)
TYPES = {mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t", mx.int32: "int32_t"}
TYPES |= {mx.uint32: "uint32_t"}
# MLX adds those that the body mentions to the signature.
ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
}
OTHER_ATTRIBUTES = (
    "dispatch_", "grid_origin", "grid_size", "quadgroup", "simdgroups_per", "thread_execution_width",
    "thread_position_in", "threads_per",
)  # fmt: skip


class Emulation:
    """Stands in for the function `mx.fast.metal_kernel`; `folder` keeps what it compiles.

    Attributes:
        order: in which order the threads between two barriers run (0: theirs, 1: reversed, more: a shuffle).
    """

    def __init__(self, folder: Path):
        self.folder, self.order = folder, 0
        self.collected: set[str] | None = None
        self.compiler = shutil.which("g++")
        if self.compiler is None:
            raise RuntimeError("these tests run the Metal kernels on the CPU and need g++, which is not installed")

    def __call__(self, name, input_names, output_names, source, header="", ensure_row_contiguous=True,
                 atomic_outputs=False):  # fmt: skip
        assert ensure_row_contiguous and not atomic_outputs, "not emulated"
        return Kernel(self, name, list(input_names), list(output_names), source, header)

    def prepare(self, function: Callable[[], object]) -> None:
        """Compile, two at a time, what `function` will run; meanwhile kernels return zeros."""
        self.collected = set()
        try:
            function()
            texts = self.collected
        finally:
            self.collected = None
        self._compile_runner()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.build, texts))

    def build(self, text: str) -> Path:
        """The program for a kernel's C++ text; compiled once."""
        program = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not program.exists():
            source = program.with_suffix(".cpp")
            source.write_text(text, encoding="utf-8")
            self._compile(source, self._compile_runner(), "-o", program)
        return program

    def _compile_runner(self) -> Path:
        runner = self.folder / "runner.o"
        if not runner.exists():
            self._compile("-c", HERE / "runner.cpp", "-o", runner)
        return runner

    def _compile(self, *arguments) -> None:
        command = [self.compiler, *FLAGS.split(), f"-I{HERE}", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


class Kernel:
    """One kernel, called as MLX's kernels are."""

    def __init__(self, emulation, name, input_names, output_names, source, header):
        self.emulation, self.name, self.source, self.header = emulation, name, source, header
        self.input_names, self.output_names = input_names, output_names

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None,
                 verbose=False, stream=None):  # fmt: skip
        assert init_value is None, "not emulated"
        assert len(inputs) == len(self.input_names)
        assert len(output_shapes) == len(output_dtypes) == len(self.output_names)
        mx.eval(inputs)
        text = translate(*self.generate(inputs, output_dtypes, template or []))
        if self.emulation.collected is not None:
            self.emulation.collected.add(text)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]
        program = self.emulation.build(text)
        buffers = []
        for name, array in zip(self.input_names, inputs):
            buffers.append((_bytes(array), False))
            if f"{name}_shape" in self.source:
                buffers.append((np.array(array.shape, np.int32).tobytes(), False))
        sizes = [int(np.prod(s)) * d.size for s, d in zip(output_shapes, output_dtypes)]
        call, results = program.with_suffix(".call"), program.with_suffix(".results")
        with open(call, "wb") as file:
            file.write(np.array([*grid, *threadgroup, self.emulation.order, len(buffers) + len(sizes)], "i8").tobytes())
            for content, output in buffers + [(size, True) for size in sizes]:
                file.write(np.array([content if output else len(content), output], "i8").tobytes())
                file.write(b"" if output else content)
        done = subprocess.run([str(program), str(call), str(results)], capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name} failed ({done.returncode}):\n{done.stderr[:4000]}"
        data, arrays, start = results.read_bytes(), [], 0
        for shape, dtype, size in zip(output_shapes, output_dtypes, sizes):
            assert dtype == mx.float32, "not emulated"
            arrays.append(mx.array(np.frombuffer(data[start : start + size], np.float32).reshape(shape)))
            start += size
        return arrays

    def generate(self, inputs, output_dtypes, template) -> tuple[str, str, list[str]]:
        """The text that MLX would compile after its own utilities, the function to call, and its parameters' types.

        Attributes are among the parameters with their name as their type.
        """
        for attribute in OTHER_ATTRIBUTES:
            assert attribute not in self.source, f"{attribute} is not emulated"
        parameters, function = [], f"custom_kernel_{self.name}"
        values = ", ".join(TYPES.get(value) or str(int(value)) for _, value in template)
        function += "__" + values.replace(", ", "_") if template else ""
        for name, array in zip(self.input_names, inputs):
            space = "constant" if array.size < 8 else "device"
            parameters.append((f"const {space} {TYPES[array.dtype]}", "&" if array.ndim == 0 else "*", name))
            assert f"{name}_strides" not in self.source and f"{name}_ndim" not in self.source, "not emulated"
            if f"{name}_shape" in self.source:
                parameters.append(("const constant int", "*", f"{name}_shape"))
            function += f"_{TYPES[array.dtype]}" + ("s" if array.ndim == 0 else "c" if array.size < 8 else "")
        parameters += [(f"device {TYPES[dtype]}", "*", name) for name, dtype in zip(self.output_names, output_dtypes)]
        function += "".join(f"_{TYPES[dtype]}" for dtype in output_dtypes)
        lines = [f"  {kind}{mark} {name} [[buffer({i})]]" for i, (kind, mark, name) in enumerate(parameters)]
        used = [name for name in ATTRIBUTES if name in self.source]
        lines += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in used]
        text = self.header
        if template:
            kinds = [
                "bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template
            ]
            text += f"template <{', '.join(f'{kind} {name}' for kind, (name, _) in zip(kinds, template))}>\n"
        text += f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n" + self.source + "\n}\n"
        if template:
            called = f"{function}<{values}>"
            text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({called}) {called};\n'
            function = called
        return text, function, [kind for kind, _, _ in parameters] + used


def translate(text: str, function: str, parameters: list[str]) -> str:
    """The kernel's text as a C++ program: arrays of the threadgroup become shared ones, and `run_kernel` calls it."""
    text, arrays = re.subn(
        r"\bthreadgroup (\w+) (\w+)\[([^\]]+)\];", r"auto \2 = emulation::threadgroup_array<\1>(\3);", text
    )
    assert arrays, "no threadgroup memory found"
    arguments, plain = [], {"threadgroup_position_in_grid", "threadgroups_per_grid"}
    for index, kind in enumerate(parameters):
        if kind in ATTRIBUTES:
            arguments.append(f"position.{kind}" + ("" if kind in plain else "()"))
        else:
            arguments.append(f"static_cast<{kind}*>(buffers[{index}])")
    return f"""#include "metal_emulation.h"
{text}
void run_kernel(void** buffers, const emulation::Position& position) {{
  {function}({", ".join(arguments)});
}}
"""


def _bytes(array: mx.array) -> bytes:
    return np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array).tobytes()

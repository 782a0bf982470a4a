"""What the CUDA form of the flash head rests on and can be checked without a GPU."""

from __future__ import annotations

import itertools
import re

import mlx.core as mx
import numpy as np
import pytest

from mlxlab import backend
from mlxlab.heads import flash_cuda, flash_cuda_source
from mlxlab.heads.flash_cuda import Plan
from mlxlab.heads.flash_cuda_source import Options
from mlxlab.heads.weights import HeadWeights
from mlxlab.linear import FrozenMatrix

SCALE_TYPES = ("bfloat16", "float16", "float32")
FORMATS = list(itertools.product((4, 8), (32, 64, 128)))  # bits, group size


def quantized(bits=4, group_size=64, columns=256, dtype=mx.bfloat16, **changes):
    weight = mx.random.normal((8, columns), key=mx.random.key(0)).astype(dtype)
    parts = mx.quantize(weight, group_size=group_size, bits=bits)
    return HeadWeights(FrozenMatrix(*parts, group_size=group_size, bits=bits, **changes))


def dense(columns=64, dtype=mx.bfloat16):
    return HeadWeights(FrozenMatrix(mx.zeros((8, columns), dtype)))


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that MLX computes on a GPU of the given compute capability."""

    def pretend(capability=(9, 0), device="cuda"):
        monkeypatch.setattr(backend, "device", lambda: device)
        monkeypatch.setattr(flash_cuda, "_capability", lambda: capability)

    return pretend


@pytest.mark.parametrize("bits, group_size", FORMATS)
def test_supports_affine_quantization(gpu, bits, group_size):
    gpu()
    assert flash_cuda.supports(mx.bfloat16, quantized(bits, group_size)) is None


def test_supports_dense_weights(gpu):
    gpu((8, 0))
    assert flash_cuda.supports(mx.bfloat16, dense(columns=48)) is None


@pytest.mark.parametrize(
    "weights, dtype, capability, device, words",
    [
        (quantized(), mx.bfloat16, (9, 0), "metal", "MLX computes on metal"),
        (quantized(), mx.bfloat16, (7, 5), "cuda", "capability 8.0 or later, and this GPU's is 7.5"),
        (quantized(), mx.float16, (9, 0), "cuda", "hidden states in bfloat16, not mlx.core.float16"),
        (dense(dtype=mx.float32), mx.bfloat16, (9, 0), "cuda", "dense weights in bfloat16, not mlx.core.float32"),
        (dense(columns=40), mx.bfloat16, (9, 0), "cuda", "multiple of 16, and this model's is 40"),
        (quantized(bits=2), mx.bfloat16, (9, 0), "cuda", "has 2 bits in groups of 64"),
        (quantized(bits=6), mx.bfloat16, (9, 0), "cuda", "has 6 bits in groups of 64"),
        (quantized(mode="mxfp4"), mx.bfloat16, (9, 0), "cuda", "this projection's mode is mxfp4"),
    ],
)
def test_supports_says_why_not(gpu, weights, dtype, capability, device, words):
    gpu(capability, device)
    reason = flash_cuda.supports(dtype, weights)
    assert words in reason
    assert reason.endswith(".") and reason.count(". ") == 0  # one sentence


def test_supports_here():
    if backend.device() != "cuda":
        assert "NVIDIA" in flash_cuda.supports(mx.bfloat16, quantized())


@pytest.mark.parametrize(
    "capability, wgmma, stages, limit",
    [
        ((8, 0), False, 3, 163), ((8, 6), False, 2, 99), ((8, 9), False, 2, 99),
        ((9, 0), True, 4, 227), ((10, 0), False, 4, 227), ((12, 0), False, 2, 99),
    ],
)  # fmt: skip
def test_shared_memory_fits(gpu, capability, wgmma, stages, limit):
    gpu(capability)
    options = flash_cuda._options(quantized())
    assert (options.wgmma, options.stages) == (wgmma, stages)
    assert options.shared_memory <= limit * 1024


def test_options_follow_the_weights(gpu):
    gpu()
    assert flash_cuda._options(quantized(8, 32, columns=96, dtype=mx.float16)) == Options(
        bits=8, group_size=32, scale_type="float16", aligned=False
    )
    weights = HeadWeights(dense().matrix, bias=mx.zeros((8,)), softcap=30.0)
    assert flash_cuda._options(weights) == Options(bits=0, bias=True, softcap=True)


@pytest.mark.parametrize("field, value", [("bits", 3), ("group_size", 16), ("scale_type", "int8"), ("stages", 1)])
def test_options_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be one of .*got {value!r}"):
        Options(**{field: value})


def all_options():
    flags = (True, False)
    for bits, group, scale, softcap, bias, wgmma in itertools.product(
        (0, 4, 8), (32, 64, 128), SCALE_TYPES, flags, flags, flags
    ):
        yield Options(bits, group, scale, softcap, bias, wgmma=wgmma, stages=4)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_source_of_every_option(kind):
    names = set()
    for options in all_options():
        header, body = flash_cuda_source.header(options), flash_cuda_source.body(kind, options)
        names.add(flash_cuda_source.name(kind, options))
        assert "$" not in body and "$" not in re.sub(r'"[^"]*"', "", header)  # nothing left to fill in
        for opening, closing in ("{}", "()", "[]"):
            text = re.sub(r'"(\\.|[^"\\])*"', "", header + body)
            assert text.count(opening) == text.count(closing)
        conditions = re.findall(r"^#(if|ifdef|ifndef|endif)\b", header + body, re.MULTILINE)
        assert 2 * conditions.count("endif") == len(conditions)
        assert ("bias" in re.findall(r"logits_in_place\(d, (\w+),", body)) == options.bias
        assert ("scales" in body) == bool(options.bits)
        assert ("wgmma.mma_async" in header) == options.wgmma
    assert len(names) == len(set(all_options()))  # MLX keeps compiled kernels by name


@pytest.mark.parametrize("transposed", [0, 1])
def test_warp_group_product_names_every_register(transposed):
    text = flash_cuda_source._wgmma(192, transposed)
    assert "m64n192k16.f32.bf16.bf16" in text
    assert len(set(re.findall(r'"\+f"\(d\[0\]\[\d+\]\[\d\]\)', text))) == 96
    assert [int(i) for i in re.findall(r"%(\d+)", text.split("{{")[-1].split("}, ")[0])][-96:] == list(range(96))
    assert text.rstrip().count(f"p, 1, 1, 0, {transposed};") == 1


def test_parameters_match_their_names():
    body = flash_cuda_source.body("backward", Options())
    for place, name in enumerate(flash_cuda_source.PARAMETERS):
        assert f"const int {name} = parameters[{place}];" in body
    options = Options()
    values = Plan.of(300, 576, 1000, options).parameters(300, 576, 1000)
    assert sorted(values) == sorted(flash_cuda_source.PARAMETERS)


# Layout


def unpack_as_the_kernel_does(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [V, n] -> numbers [V, n * 32 / bits], by the kernel's byte permutations."""
    columns = []
    for word in words.T.astype(np.uint64):
        for byte in range(4):
            shifted = (word >> np.uint64(8 * byte)) & np.uint64(0xFF)
            columns += [shifted] if bits == 8 else [shifted & np.uint64(15), (shifted >> np.uint64(4)) & np.uint64(15)]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.mark.parametrize("bits, group_size", FORMATS)
def test_packing_is_little_endian(bits, group_size):
    weight = mx.random.normal((6, 256), key=mx.random.key(1))
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    assert packed.dtype == mx.uint32 and packed.shape == (6, 256 * bits // 32)
    assert scales.shape == biases.shape == (6, 256 // group_size)
    numbers = unpack_as_the_kernel_does(np.array(packed), bits)
    ours = numbers * np.repeat(np.array(scales), group_size, 1) + np.repeat(np.array(biases), group_size, 1)
    expected = np.array(mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)  # one rounding against two, numbers of size 1


def as_float(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def test_bit_patterns_of_numbers():
    four, eight = np.arange(16), np.arange(256)
    assert (as_float((0x4300 + four) << 16) - 128 == four).all()  # a bfloat16 is the upper half of a float
    assert (as_float(0x4B000000 + eight) - 8388608 == eight).all()


def test_order_of_coefficients_is_a_permutation():
    place = np.arange(64)
    row = (place & ~31) + 8 * ((place >> 1) & 3) + 2 * ((place >> 3) & 3) + (place & 1)
    assert sorted(row) == list(range(64))
    # A thread q of four holds columns 8 j + 2 q + e and writes them one after the other.
    held = [8 * j + 2 * q + e for q in range(4) for j in range(4) for e in range(2)]
    assert list(row[:32]) == held


@pytest.mark.parametrize("lines", [8, 64, 192])
def test_swizzle_is_a_permutation_without_bank_conflicts(lines):
    address = {(line, chunk): line * 128 + ((chunk ^ (line & 7)) << 4) for line in range(lines) for chunk in range(8)}
    assert sorted(address.values()) == list(range(0, lines * 128, 16))
    for start, chunk in itertools.product(range(0, lines, 8), range(8)):  # eight neighbouring lines, one chunk
        assert len({address[start + i, chunk] % 128 for i in range(8)}) == 8


# Plan

ROWS = (1, 7, 130, 192, 1024, 1100, 1536, 2048, 2304, 3072, 8192, 20000)


@pytest.mark.parametrize("wgmma", [True, False])
@pytest.mark.parametrize("columns", [64, 576, 1536, 2560, 4096])
def test_plan_bounds_its_memory(columns, wgmma):
    options = Options(wgmma=wgmma, stages=4)
    for rows, vocabulary in itertools.product(ROWS, (33, 4099, 130560, 262144)):
        plan = Plan.of(rows, columns, vocabulary, options)
        partial_results = 4 * plan.parts * rows * columns if plan.parts > 1 else 0
        assert plan.scratch_bytes + partial_results <= 51 * 2**20


@pytest.mark.parametrize("vocabulary", [33, 1000, 4099, 130560])
def test_plan_covers_everything_once(vocabulary):
    options = Options()
    for rows in ROWS:
        plan = Plan.of(rows, 1536, vocabulary, options)
        seen = []
        for part, piece in itertools.product(range(plan.parts), range(plan.ranges)):
            begin = part * plan.vocabulary_tiles_per_part + piece * plan.range_tiles
            end = min(begin + plan.range_tiles, (part + 1) * plan.vocabulary_tiles_per_part)
            seen += range(begin, min(end, -(-vocabulary // options.columns)))
        assert seen == list(range(-(-vocabulary // options.columns)))
        assert plan.chunks * plan.row_tiles * options.rows >= rows
        assert (plan.chunks - 1) * plan.row_tiles * options.rows < rows or plan.chunks == 1
        assert plan.parts == 1 or plan.chunks == 1
        assert plan.column_tiles * options.columns >= 1536


def order_of_work(plan: Plan):
    """(kind, step, tile of rows) in the order in which the kernel draws them, by the kernel's arithmetic."""
    first = plan.virtual_tiles * -(-plan.range_tiles // plan.tiles_per_item)
    second = plan.virtual_tiles * plan.column_tiles
    for drawn in range(plan.steps * (first + second)):
        item, step, coefficient = drawn, 0, True
        if item >= first:
            item -= first
            step = item // (first + second) + 1
            item %= first + second
            coefficient = step < plan.steps and item < first
            if not coefficient:
                item -= first if step < plan.steps else 0
                step -= 1
        yield "coefficients" if coefficient else "products", step, item % plan.virtual_tiles, item // plan.virtual_tiles


@pytest.mark.parametrize("rows, columns, vocabulary", [(7, 576, 1000), (1100, 96, 9000), (2500, 320, 20000)])
def test_no_work_waits_for_later_work(rows, columns, vocabulary):
    plan = Plan.of(rows, columns, vocabulary, Options())
    per_row = {"coefficients": -(-plan.range_tiles // plan.tiles_per_item), "products": plan.column_tiles}
    drawn: dict[tuple[str, int, int], set[int]] = {}
    in_flight, count = flash_cuda_source.RANGES_IN_FLIGHT, 0
    for kind, step, tile, inner in order_of_work(plan):
        needs = [("products", step - (in_flight if kind == "coefficients" else 1), tile)]
        needs += [("coefficients", step, tile)] if kind == "products" else []
        for need in needs:
            assert need[1] < 0 or len(drawn[need]) == per_row[need[0]]
        done = drawn.setdefault((kind, step, tile), set())
        assert inner not in done and inner < per_row[kind]
        done.add(inner)
        count += 1
    assert count == plan.items

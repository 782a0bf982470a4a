"""The Metal kernels of the flash head against its array operations: on an Apple GPU itself, elsewhere on the CPU.

Without Metal their text is compiled by g++ (see tests/metal_emulation) with the address and the undefined-behaviour
sanitizer; threadgroup memory and outputs start as NaN, so an entry that is not written shows in the result.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from metal_emulation import Emulation

from mlxlab import backend
from mlxlab.heads import flash_check, flash_metal, flash_metal_source
from mlxlab.heads.flash import Flash
from mlxlab.heads.fused import _backward, _forward
from mlxlab.heads.weights import HeadWeights
from mlxlab.linear import FrozenMatrix

METAL = mx.metal.is_available()
F32, BF16, F16 = mx.float32, mx.bfloat16, mx.float16

# M, V, H, bits (0: dense), group, dtype, softcap, scale, bias
CASES = [
    (1, 33, 64, 4, 32, F32, None, 1.0, False),
    (5, 100, 32, 4, 32, BF16, 2.0, 1.0, False),
    (33, 1000, 96, 4, 32, F32, 2.0, 0.5, True),
    (70, 33, 128, 4, 64, F16, None, 1.5, False),
    (5, 100, 256, 4, 128, BF16, None, 1.0, False),
    (33, 100, 96, 8, 32, BF16, None, 1.0, False),
    (1, 1000, 64, 8, 64, F16, 2.0, 1.0, True),
    (130, 70, 128, 8, 128, F32, None, 1.0, False),
    (5, 1000, 96, 0, 0, F32, 2.0, 0.5, False),
    (33, 100, 64, 0, 0, BF16, None, 2.0, True),
    (1, 3, 32, 0, 0, F16, None, 0.3, True),  # targets and bias in the constant address space
]


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The emulation, with all kernels of CASES compiled; None where there is Metal."""
    if METAL:
        return None
    emulation = Emulation(tmp_path_factory.mktemp("metal"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", emulation)
        flash_metal._kernel.cache_clear()
        emulation.prepare(lambda: [run(*problem(*case)[:4]) for case in CASES])
    return emulation


@pytest.fixture
def emulation(programs, monkeypatch):
    """mx.fast.metal_kernel replaced where there is no Metal."""
    if programs is not None:
        programs.order = 0
        monkeypatch.setattr(mx.fast, "metal_kernel", programs)
    flash_metal._kernel.cache_clear()
    yield programs
    flash_metal._kernel.cache_clear()


def problem(rows, entries, hidden, bits, group, dtype, softcap, scale, bias):
    """Rows, targets, weights and a cotangent that differs from row to row, and the weights in float32."""
    keys = iter(mx.random.split(mx.random.key(rows + entries + hidden), 5))
    x = mx.random.normal((rows, hidden), key=next(keys)).astype(dtype)
    w = (mx.random.normal((entries, hidden), key=next(keys)) * (3 / hidden**0.5)).astype(dtype)
    targets = mx.random.randint(0, entries, (rows,), key=next(keys)).astype(mx.int32)
    cotangent = mx.random.uniform(0.2, 1.0, (rows,), key=next(keys)) * (-1.0) ** mx.arange(rows)
    b = mx.random.normal((entries,), key=next(keys)).astype(dtype) if bias else None
    options = {"group_size": group, "bits": bits}
    packed = mx.quantize(w, **options) if bits else (w,)
    exact = FrozenMatrix(w.astype(F32))
    if bits:
        exact = FrozenMatrix(mx.dequantize(packed[0], packed[1].astype(F32), packed[2].astype(F32), **options))
    matrix = FrozenMatrix(*packed, **options) if bits else FrozenMatrix(w)
    weights = HeadWeights(matrix, b, scale, softcap)
    return x, targets, cotangent, weights, HeadWeights(exact, None if b is None else b.astype(F32), scale, softcap)


def reference(x, targets, cotangent, exact):
    with mx.stream(mx.cpu):
        head = Flash(chunk_tokens=7, tile_vocab=29)
        (logp,), (gradient,) = mx.vjp(lambda r: head(r, targets, exact), [x.astype(F32)], [cotangent])
        mx.eval(logp, gradient)
    return logp, gradient


def run(x, targets, cotangent, weights):
    logp, peak, log_sum = flash_metal.forward(x, targets, weights)
    return logp, flash_metal.backward(x, targets, weights, cotangent, peak, log_sum), peak, log_sum


def assert_close(results, x, targets, cotangent, exact):
    """float32 sums in another order: 1e-5; a gradient in 16 bits is rounded once, to 11 or 8 bits."""
    logp, gradient, peak, log_sum = results
    expected, expected_gradient = reference(x, targets, cotangent, exact)
    z = exact.logits(x.astype(F32))
    assert logp.dtype == peak.dtype == log_sum.dtype == F32 and gradient.dtype == x.dtype
    assert logp.shape == peak.shape == log_sum.shape == (x.shape[0],) and gradient.shape == x.shape
    assert mx.allclose(logp, expected, rtol=1e-5, atol=1e-5)
    assert mx.allclose(peak, z.max(axis=-1), rtol=1e-5, atol=1e-5)
    assert mx.allclose(peak + log_sum, mx.logsumexp(z, axis=-1), rtol=1e-5, atol=1e-5)
    rounding = {F32: 0, F16: 2**-11, BF16: 2**-8}[x.dtype]
    largest = mx.abs(expected_gradient).max()
    difference = mx.abs(gradient.astype(F32) - expected_gradient)
    assert largest > 0.01
    assert (difference <= 2e-5 * largest + rounding * mx.abs(expected_gradient)).all(), difference.max() / largest


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_equal_the_array_operations(emulation, case):
    x, targets, cotangent, weights, exact = problem(*case)
    assert_close(run(x, targets, cotangent, weights), x, targets, cotangent, exact)


@pytest.mark.parametrize("case", [CASES[2], CASES[7]], ids=str)
def test_several_tiles_per_block_and_several_chunks(emulation, case, monkeypatch):
    """Few blocks in the forward pass; chunks of 64 rows and ranges of 64 vocabulary entries in the backward pass."""
    monkeypatch.setattr(flash_metal, "_THREADGROUPS", 3)
    monkeypatch.setattr(flash_metal, "_CHUNK_ROWS", 64)
    monkeypatch.setattr(flash_metal, "SCRATCH_BYTES", 64 * 4 * 70)
    x, targets, cotangent, weights, exact = problem(*case)
    assert_close(run(x, targets, cotangent, weights), x, targets, cotangent, exact)


def test_large_logits_neither_overflow_nor_vanish(emulation):
    x, targets, cotangent, weights, exact = problem(33, 100, 64, 0, 0, F32, None, 60.0, False)
    logp, gradient, _, _ = run(x, targets, cotangent, weights)
    expected, expected_gradient = reference(x, targets, cotangent, exact)
    assert mx.abs(expected).max() > 300  # exp of it overflows or vanishes in float32
    assert mx.allclose(logp, expected, rtol=1e-5, atol=1e-3)
    assert mx.linalg.norm(gradient - expected_gradient) < 1e-3 * mx.linalg.norm(expected_gradient)


def test_views_of_larger_arrays(emulation):
    """Rows and weights that start within a buffer, and rows that are not contiguous."""
    x, targets, cotangent, weights, exact = problem(33, 100, 64, 4, 32, F32, None, 1.0, False)
    padded = mx.concatenate([mx.full(x.shape, mx.nan), x], axis=1)[:, 64:][3:]
    results = run(padded, targets[3:] - 30, cotangent[3:], weights.tile(30, 100))
    assert_close(results, x[3:], targets[3:] - 30, cotangent[3:], exact.tile(30, 100))


def test_result_does_not_depend_on_the_order_of_threads(emulation):
    """A missing barrier makes it depend on the order; the same bits also mean that nothing is added atomically."""
    x, targets, cotangent, weights, _ = problem(*CASES[5])
    runs = []
    for order in (0, 1, 2, 3):
        if emulation is not None:
            emulation.order = order
        runs.append(run(x, targets, cotangent, weights))
    for other in runs[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(runs[0], other))


# Defects of the kernels, and that they show: replacing the first text by the second.
DEFECTS = {
    "rows beyond the end are read": ("row + line < rows, row + line", "true, row + line"),
    "vocabulary beyond the end is read": ("entry + line < entries, entry", "true, entry"),
    "vocabulary beyond the end is summed": ("if (tile * TILE + c < entries)", "if (true)"),
    "a partial result is not written": ("part_total[place] = total;", ""),
    "rows beyond the end are written": ("    if (mine < rows && entry", "    if (entry"),
    "no barrier before staging": ("threadgroup_barrier(mem_flags::mem_threadgroup);  // what", "// what"),
    "no barrier after staging": (
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    quarter.add_product<true>",
        "    quarter.add_product<true>",
    ),
    "no barrier before the result": ("quarter.store(memory);\n  threadgroup_barrier", "quarter.store(memory);\n  //"),
    "the result overwrites what others still read": (
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  quarter.store(memory);",
        "  quarter.store(memory);",
    ),
    "a barrier that not all threads reach": (
        "  if (mine < rows) {",
        "  if (mine < rows) {\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
    ),
    "too much threadgroup memory": ("float memory[TILE * RESULT];", "float memory[TILE * RESULT * 2];"),
    "a matrix loaded by some threads only": (
        "    quarter.add_product<true>",
        "    if (index % 32 < 16) quarter.add_product<true>",
    ),
    "one cotangent for all rows": ("cotangent[mine]", "cotangent[0]"),
    "the softcap's slope is forgotten": ("* slope *", "*"),
    "the gradient so far is forgotten": ("sum[place] = gradient[place] +", "sum[place] ="),
    "quantized values in the wrong order": ("word >> (BITS * i)", "word >> (32 - BITS - BITS * i)"),
}


@pytest.mark.skipif(METAL, reason="defects are shown by the emulation, never to a GPU")
@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_show(emulation, defect, monkeypatch):
    old, new = DEFECTS[defect]
    texts = ("HEADER", "FORWARD", "COEFFICIENTS", "ACCUMULATE")
    assert any(old in getattr(flash_metal_source, name) for name in texts)
    for name in texts:
        monkeypatch.setattr(flash_metal_source, name, getattr(flash_metal_source, name).replace(old, new))
    monkeypatch.setattr(flash_metal, "SCRATCH_BYTES", 64 * 4 * 40)
    x, targets, cotangent, weights, exact = problem(33, 70, 96, 4, 32, F32, 2.0, 1.0, False)
    emulation.prepare(lambda: run(x, targets, cotangent, weights))
    with pytest.raises(AssertionError):
        for order in (0, 1):
            emulation.order = order
            assert_close(run(x, targets, cotangent, weights), x, targets, cotangent, exact)


def test_a_missing_compiler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="need g\\+\\+, which is not installed"):
        Emulation(tmp_path)


def test_calls_follow_the_conventions_of_metal_kernels(emulation, monkeypatch):
    """Threads, not threadgroups, make the grid; the vocabulary per threadgroup and the scratch array are bounded."""
    calls = []

    def metal_kernel(name, input_names, output_names, source, header):
        def call(**options):
            calls.append((name, options))
            assert len(options["inputs"]) == len(input_names) and len(output_names) == len(options["output_shapes"])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(options["output_shapes"], options["output_dtypes"])]

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    rows, entries, hidden = 2100, 20000, 32
    x, targets, cotangent, weights, _ = problem(rows, entries, hidden, 4, 32, BF16, None, 1.0, False)
    run(x, targets, cotangent, weights)
    forward, backward = calls[0], calls[1:]
    blocks = forward[1]["output_shapes"][0][0] // 2
    assert forward[1]["grid"] == (128 * blocks, 33, 1) and entries / blocks <= 8192
    assert [name for name, _ in backward] == [
        "mlxlab_flash_coefficients_quantized",
        "mlxlab_flash_accumulate_quantized",
    ] * 8
    for name, options in calls:
        assert options["threadgroup"] == (128, 1, 1) and all(kind == F32 for kind in options["output_dtypes"])
        if name.startswith("mlxlab_flash_coefficients"):
            (m, width), (x_threads, row_tiles, _) = options["output_shapes"][0], options["grid"]
            assert m * width * 4 <= 32 * 2**20
            assert x_threads == 128 * -(-width // 64) and row_tiles == -(-m // 64)
    widths = [options["output_shapes"][0] for name, options in backward if name.startswith("mlxlab_flash_coefficients")]
    assert sum(m * width for m, width in widths) == rows * entries


# --- possible, checked, or replaced ---


@pytest.fixture
def metal(monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "metal")
    monkeypatch.setattr(flash_check, "_verdicts", {})


def head(bits=4, group=32, dtype=BF16, hidden=64, softcap=None):
    return problem(1, 40, hidden, bits, group, dtype, softcap, 1.0, False)[3]


def mxfp4():
    packed = mx.quantize(mx.ones((40, 64)), mode="mxfp4", group_size=32, bits=4)
    return HeadWeights(FrozenMatrix(*packed, group_size=32, mode="mxfp4"))


def test_supports(metal, monkeypatch):
    assert flash_metal.supports(BF16, head()) is None
    assert flash_metal.supports(F32, head(bits=0)) is None
    assert "float64" in flash_metal.supports(mx.float64, head())
    assert "multiple of 32, and this model's is 40" in flash_metal.supports(F32, head(bits=0, hidden=40))
    assert "6 bits in groups of 64" in flash_metal.supports(F32, head(bits=6, group=64))
    assert "mxfp4" in flash_metal.supports(F32, mxfp4())
    monkeypatch.setattr(backend, "device", lambda: "cuda")
    assert "cuda" in flash_metal.supports(BF16, head())


def in_float32(weights):
    """As the kernels compute, whatever the dtypes."""
    matrix = weights.matrix
    if matrix.quantized:
        matrix = replace(matrix, scales=matrix.scales.astype(F32), biases=matrix.biases.astype(F32))
    return replace(weights, matrix=FrozenMatrix(matrix.dense(F32)))


def right_forward(hidden, targets, weights):
    return _forward(hidden.astype(F32), targets, in_float32(weights))


def right_backward(hidden, targets, weights, *others):
    return _backward(hidden.astype(F32), targets, in_float32(weights), *others).astype(hidden.dtype)


def uniform_backward(hidden, targets, weights, cotangent, *others):
    uniform = mx.broadcast_to(cotangent.mean(), cotangent.shape)
    return right_backward(hidden, targets, weights, uniform, *others)


def no_compiler(*_):
    raise RuntimeError("[metal::Device] Unable to build metal library from source")


def nan_forward(hidden, targets, weights):
    return [value * mx.nan for value in right_forward(hidden, targets, weights)]


def test_a_right_kernel_is_checked_once_and_used(metal):
    calls = []

    def counted(*arguments):
        calls.append(arguments[0].dtype)
        return right_forward(*arguments)

    for _ in range(3):
        assert flash_check.checked(flash_metal, BF16, head(), counted, right_backward)
    assert len(calls) == 1
    assert flash_check.checked(flash_metal, F32, head(softcap=5.0), counted, right_backward)
    assert calls == [BF16, F32]
    first, second = flash_check.status()
    assert first.startswith(
        "flash head, bfloat16 rows, affine 4 bit, group 32 bfloat16 weights, hidden size 64: Metal kernel"
    )
    assert "softcap" in second and "differ by" in second


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (right_forward, uniform_backward, "gradients by .* from array operations"),
        (nan_forward, right_backward, "log-probabilities differ by nan"),
        (no_compiler, right_backward, "RuntimeError: .*Unable to build metal library"),
        (right_forward, no_compiler, "RuntimeError: .*Unable to build metal library"),
    ],
    ids=["wrong gradient", "not a number", "forward raises", "backward raises"],
)
def test_a_bad_kernel_is_replaced_with_one_warning(metal, forward, backward, message):
    with pytest.warns(UserWarning, match=message) as caught:
        assert not flash_check.checked(flash_metal, BF16, head(), forward, backward)
    assert len(caught) == 1
    assert not flash_check.checked(flash_metal, BF16, head(), forward, backward)  # a second warning would be an error
    (line,) = flash_check.status()
    assert "array operations" in line


def test_an_impossible_head_is_reported_once(metal):
    with pytest.warns(UserWarning, match="6 bits in groups of 64"):
        assert not flash_check.checked(flash_metal, BF16, head(bits=6, group=64))
    assert not flash_check.checked(flash_metal, BF16, head(bits=6, group=64))
    with pytest.warns(UserWarning, match="mode is mxfp4"):
        assert not flash_check.checked(flash_metal, BF16, mxfp4())
    assert flash_check.checked(
        flash_metal, BF16, head(), right_forward, right_backward
    )  # 4 bits in groups of 32 as well
    assert len(flash_check.status()) == 3


def test_without_metal_nothing_is_checked_or_said(metal, monkeypatch):
    monkeypatch.setattr(backend, "device", lambda: "cpu")
    assert not flash_check.checked(flash_metal, BF16, head(), no_compiler, no_compiler)
    assert flash_check.status() == []


@pytest.mark.parametrize("transform", [mx.value_and_grad, mx.compile, lambda function: function])
def test_the_check_runs_inside_transformations_and_keeps_the_random_state(metal, transform):
    answers = []

    def loss(x):
        answers.append(flash_check.checked(flash_metal, F32, head(), right_forward, right_backward))
        return (x * x).sum()

    before = [mx.array(part) for part in mx.random.state]
    mx.eval(transform(loss)(mx.arange(3.0)))
    assert answers == [True]
    assert all(mx.array_equal(a, b) for a, b in zip(before, mx.random.state))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_real_kernels_pass_the_check(metal, emulation, softcap):
    assert flash_check.checked(flash_metal, BF16, head(softcap=softcap))

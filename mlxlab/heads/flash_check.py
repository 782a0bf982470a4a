"""A one-time check of a flash kernel on the machine it runs on, against array operations.

A kernel is a module with DEVICE, TITLE, LOGP_TOLERANCE, `supports`, `forward` and `backward` (see `flash_metal`).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import ModuleType
from typing import Callable, NamedTuple

import mlx.core as mx

from mlxlab import backend
from mlxlab.heads.fused import Fused
from mlxlab.heads.weights import HeadWeights
from mlxlab.linear import FrozenMatrix

# Relative norm of the gradient difference. The gradient comes in the hidden dtype, so its rounding is part of it.
_GRADIENT_TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-3, mx.bfloat16: 1e-2}


class _Case(NamedTuple):
    """What decides which code a kernel call compiles and how it walks through its arrays."""

    dtype: mx.Dtype
    weight_dtype: mx.Dtype
    mode: str
    bits: int  # 0: dense
    group_size: int
    hidden: int
    softcap: bool
    bias: bool

    def __str__(self) -> str:
        weights = f"{self.mode} {self.bits} bit, group {self.group_size}" if self.bits else "dense"
        weights += f" {_dtype_name(self.weight_dtype)} weights" + ", softcap" * self.softcap + ", bias" * self.bias
        return f"{_dtype_name(self.dtype)} rows, {weights}, hidden size {self.hidden}"


_verdicts: dict[_Case, tuple[bool, str]] = {}


def checked(
    kernel: ModuleType,
    dtype: mx.Dtype,
    weights: HeadWeights,
    forward: Callable | None = None,
    backward: Callable | None = None,
) -> bool:
    """Whether to use a kernel for this head: it is possible and agreed with array operations on this machine.

    The first use of each kind of head (dtypes, bits, group, softcap, bias, H) compares both on a small random problem.
    If they differ or the kernel fails, a warning says so once, and the answer stays False. On another device the answer
    is False and nothing is remembered. The global random state is left alone. `forward` and `backward` stand in for the
    kernel's own functions.
    """
    if backend.device() != kernel.DEVICE:
        return False
    matrix = weights.matrix
    case = _Case(
        dtype,
        (matrix.scales if matrix.quantized else matrix.weight).dtype,
        matrix.mode,
        matrix.bits if matrix.quantized else 0,
        matrix.group_size if matrix.quantized else 0,
        matrix.shape[1],
        weights.softcap is not None,
        weights.bias is not None,
    )
    if case not in _verdicts:
        usable, verdict = _verdict(kernel, case, weights, forward or kernel.forward, backward or kernel.backward)
        _verdicts[case] = usable, f"{kernel.TITLE} kernel, {verdict}" if usable else f"array operations, {verdict}"
        if not usable:
            warnings.warn(
                f"flash head: array operations replace the {kernel.TITLE} kernel ({case}): {verdict}", stacklevel=2
            )
    return _verdicts[case][0]


def status() -> list[str]:
    """One line per kind of head that `checked` has seen: what computes it and why."""
    return [f"flash head, {case}: {verdict}" for case, (_, verdict) in _verdicts.items()]


def _verdict(
    kernel: ModuleType, case: _Case, weights: HeadWeights, forward: Callable, backward: Callable
) -> tuple[bool, str]:
    reason = kernel.supports(case.dtype, weights)
    if reason is not None:
        return False, reason
    try:
        value, gradient = _differences(case, weights, forward, backward)
    except Exception as error:  # whatever the compiler or the driver raises: training can go on without the kernel
        return False, f"it failed with {type(error).__name__}: {str(error).strip() or 'no message'}"
    # Written so that NaN counts as a difference.
    agrees = value <= kernel.LOGP_TOLERANCE and gradient <= _GRADIENT_TOLERANCE[case.dtype]
    figures = f"log-probabilities differ by {value:.1e}, gradients by {gradient:.1e}"
    allowed = f"allowed {kernel.LOGP_TOLERANCE:.0e} and {_GRADIENT_TOLERANCE[case.dtype]:.0e}"
    return agrees, f"{figures} from array operations ({allowed})."


def _differences(case: _Case, weights: HeadWeights, forward: Callable, backward: Callable) -> tuple[float, float]:
    """Of log-probabilities (relative to 1 + their size) and gradients (relative norm), on 70 rows and 200 entries."""
    rows, entries = 70, 200  # two tiles of rows, four of the vocabulary, neither full
    keys = iter(mx.random.split(mx.random.key(0), 5))
    hidden = mx.random.normal((rows, case.hidden), key=next(keys)).astype(case.dtype)
    weight = mx.random.normal((entries, case.hidden), key=next(keys)) * (3.0 / case.hidden**0.5)
    bias = mx.random.normal((entries,), key=next(keys)).astype(weights.bias.dtype) if case.bias else None
    targets = mx.random.randint(0, entries, (rows,), key=next(keys)).astype(mx.int32)
    cotangent = mx.random.uniform(0.1, 1.0, (rows,), key=next(keys))
    matrix = FrozenMatrix(weight.astype(case.weight_dtype))
    if case.bits:
        options = {"group_size": case.group_size, "bits": case.bits}
        matrix = FrozenMatrix(*mx.quantize(matrix.weight, **options), **options)
    small = HeadWeights(matrix, bias, weights.scale, weights.softcap)
    logp, peak, log_sum = forward(hidden, targets, small)
    gradient = backward(hidden, targets, small, cotangent, peak, log_sum)
    mx.eval(logp, gradient)

    with mx.stream(mx.cpu):  # some GPUs round the operands of float32 products
        expected, expected_gradient = _reference(hidden, targets, small, cotangent)
        value = (mx.abs(logp - expected) / (1 + mx.abs(expected))).max()
        difference = mx.linalg.norm(gradient.astype(mx.float32) - expected_gradient)
        return value.item(), (difference / mx.linalg.norm(expected_gradient)).item()


def _reference(hidden: mx.array, targets: mx.array, weights: HeadWeights, cotangent: mx.array) -> list[mx.array]:
    """Log-probabilities and gradient in float32, by the fused head: the flash head would ask for this very check."""
    matrix, bias = weights.matrix, weights.bias
    if matrix.quantized:  # the kernels round neither scale * q + bias nor the weights
        matrix = replace(matrix, scales=matrix.scales.astype(mx.float32), biases=matrix.biases.astype(mx.float32))
    bias = None if bias is None else bias.astype(mx.float32)
    weights = replace(weights, matrix=FrozenMatrix(matrix.dense(mx.float32)), bias=bias)
    (logp,), (gradient,) = mx.vjp(
        lambda rows: Fused()(rows, targets, weights), [hidden.astype(mx.float32)], [cotangent]
    )
    return [logp, gradient]


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]

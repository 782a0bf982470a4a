"""exp and SwiGLU, fast on every backend.

MLX's CPU build (0.32.4) takes several times as long for an exponential or a sigmoid as for a power, so on a CPU an
exponential is a power of 2.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from mlxlab import backend

_LOG2_E = math.log2(math.e)


def exp(x: mx.array) -> mx.array:
    """exp(x) elementwise, float32 [...]; relative error below 1e-6 for |x| < 10, growing with |x|."""
    return mx.power(2.0, x * _LOG2_E) if on_cpu() else mx.exp(x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x elementwise [...] (Shazeer, 2020); on a CPU with an analytic backward from its inputs alone."""
    return _cpu_swiglu(gate, x) if on_cpu() else nn.silu(gate) * x


@cache
def on_cpu() -> bool:
    return backend.device() == "cpu"


@mx.custom_function
def _cpu_swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * _sigmoid(gate) * x


@_cpu_swiglu.vjp
def _(primals, cotangent, output):
    gate, x = primals
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    return cotangent * x * (sigmoid + silu * (1 - sigmoid)), cotangent * silu


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + exp(-x))

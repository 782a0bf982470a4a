"""Log-domain functions that stay finite, in value and gradient."""

from __future__ import annotations

import mlx.core as mx

_LOG_HALF = -0.6931471805599453
# The gradient of log1mexp at x is about 1/x; this bound keeps it and the value finite at x = 0, where it would be
# infinite, and is far below any mean log-probability that float32 arithmetic can tell from 0 after a forward pass.
_LARGEST = -1e-10


def log1mexp(x: mx.array) -> mx.array:
    """log(1 - exp(x)) for x <= 0, elementwise, float32.

    Two branches (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012): log(-expm1(x)) above -ln 2,
    log1p(-exp(x)) below. Each branch sees only arguments that suit it, so that neither makes a NaN gradient.
    Arguments above -1e-10 count as -1e-10.
    """
    x = mx.minimum(x, _LARGEST)
    near = x > _LOG_HALF
    small = mx.where(near, x, _LOG_HALF)
    large = mx.where(near, _LOG_HALF, x)
    return mx.where(near, mx.log(-mx.expm1(small)), mx.log1p(-mx.exp(large)))


def softplus(x: mx.array) -> mx.array:
    """log(1 + exp(x)) = -log sigmoid(-x), elementwise."""
    return mx.logaddexp(x, mx.zeros_like(x))

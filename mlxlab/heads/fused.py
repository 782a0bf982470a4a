"""Projection and cross-entropy as one operation with an analytic backward (the linear cross-entropy of
Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, here over token chunks).

    dlogp/dz = onehot(target) - softmax(z)
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxlab.elementwise import exp
from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Head


def _forward(hidden: mx.array, targets: mx.array, weights: HeadWeights) -> tuple[mx.array, mx.array, mx.array]:
    """Per row: log-probability, maximum logit, and log of the sum of exponentials relative to that maximum."""
    z = weights.logits(hidden)
    peak = z.max(axis=-1, keepdims=True)
    log_sum = mx.log(exp(z - peak).sum(axis=-1))
    target = mx.take_along_axis(z, targets[:, None], axis=-1)
    return (target - peak)[:, 0] - log_sum, peak[:, 0], log_sum


def _backward(hidden, targets, weights, cotangent, peak, log_sum) -> mx.array:
    z = weights.logits(hidden)
    probability = exp((z - peak[:, None]) - log_sum[:, None])
    onehot = mx.arange(z.shape[-1])[None] == targets[:, None]
    gradient = (onehot.astype(mx.float32) - probability) * cotangent[:, None]
    return weights.backproject(gradient, z, hidden.dtype).astype(hidden.dtype)


@dataclass(frozen=True)
class Fused(Head):
    """Memory: float32 arrays [chunk_tokens, V], in both directions; no gradient for the projection itself.

    Args:
        chunk_tokens: scored rows whose logits exist at the same time.
    """

    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")

    def __call__(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        step = self.rows_per_call(hidden.shape[0])
        chunks = [slice(i, i + step) for i in range(0, hidden.shape[0], step)]

        @mx.custom_function
        def linear_cross_entropy(hidden):
            pieces = [_forward(hidden[c], targets[c], weights) for c in chunks]
            return [mx.concatenate(column) for column in zip(*pieces)]

        @linear_cross_entropy.vjp
        def backward(primal, cotangents, outputs):
            cotangent, (_, peak, log_sum) = cotangents[0], outputs
            pieces = [_backward(primal[c], targets[c], weights, cotangent[c], peak[c], log_sum[c]) for c in chunks]
            return mx.concatenate(pieces)

        return linear_cross_entropy(hidden)[0]

    def rows_per_call(self, rows: int) -> int:
        return min(rows, self.chunk_tokens)

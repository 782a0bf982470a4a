"""Full logits at once: the reference for every other head."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Head


def log_probabilities(hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
    """log softmax(logits)[target], float32 [M].

    The maximum is taken off before the target is picked: a log-sum-exp of large logits would round their gaps away.
    """
    z = weights.logits(hidden)
    z = z - mx.stop_gradient(z.max(axis=-1, keepdims=True))
    return mx.take_along_axis(z, targets[:, None], axis=-1)[:, 0] - mx.log(mx.exp(z).sum(axis=-1))


@dataclass(frozen=True)
class Naive(Head):
    """Memory: several float32 arrays [M, V]."""

    def __call__(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        return log_probabilities(hidden, targets, weights)

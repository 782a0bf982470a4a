"""Token chunks, each rematerialized in the backward pass by automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxlab.heads.naive import log_probabilities
from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Head


@dataclass(frozen=True)
class Chunked(Head):
    """Memory: float32 arrays [chunk_tokens, V].

    Args:
        chunk_tokens: scored rows whose logits exist at the same time.
    """

    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")

    def __call__(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        step = self.rows_per_call(hidden.shape[0])
        if step == hidden.shape[0]:
            return log_probabilities(hidden, targets, weights)
        pieces = []
        for i in range(0, hidden.shape[0], step):
            target = targets[i : i + step]  # captured: integers have no vjp
            piece = mx.checkpoint(lambda h, target=target: log_probabilities(h, target, weights))
            pieces.append(piece(hidden[i : i + step]))
        return mx.concatenate(pieces)

    def rows_per_call(self, rows: int) -> int:
        return min(rows, self.chunk_tokens)

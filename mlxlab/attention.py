"""What a block gets for one stream: mask, position, and a cache object of mlx-lm's protocol.

Sharing a prompt is a differentiable prompt cache. The prompt stream runs first inside each block and its keys and
values are captured; a stream that continues it gets them in front of its own. Positions, windows and grouped heads
need nothing new, and full attention keeps mask="causal", which MLX aligns to the last key when there are fewer queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxlab.attend import Mask
from mlxlab.interfaces import Attention


class CaptureKV:
    """Keeps the keys and values [B, heads, T, D] of this call, for the streams that continue this one."""

    offset = 0

    def __init__(self) -> None:
        self.captured: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.captured = keys, values
        return keys, values


class PrefixKV:
    """Puts the parent's keys and values in front of this stream's own."""

    def __init__(self, captured: tuple[mx.array, mx.array], offset: int):
        self.captured, self.offset = captured, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        parent_keys, parent_values = self.captured
        return mx.concatenate([parent_keys, keys], axis=2), mx.concatenate([parent_values, values], axis=2)


@dataclass
class StreamAttention(Attention):
    """Attention of one stream whose first token stands at `offset`.

    Args:
        starts, longest: of the documents in the stream, see `Mask`.
        masks: None: layers get masks as MLX takes them. A list: they get a `Mask`, and it is noted there.
    """

    length: int
    offset: int = 0
    cache: Any = None
    starts: mx.array | None = None
    longest: int | None = None
    masks: list[Mask] | None = None

    def mask(self, window: int | None = None) -> Mask | mx.array | str | None:
        mask = Mask(self.length, self.offset, window, self.starts, self.longest)
        if self.masks is None or (mask.causal and self.length == 1):
            return mask.plain()
        self.masks.append(mask)
        return mask


def document_starts(documents: np.ndarray | None) -> tuple[np.ndarray | None, int | None]:
    """Where the document of each token starts, int32 [B, T], and a bound on the length of documents in tokens.

    The bound is a multiple of 64, so that batches share compiled code. A token of padding is a document of its own.
    """
    if documents is None:
        return None, None
    before = np.concatenate([np.full_like(documents[:, :1], -2), documents[:, :-1]], axis=1)
    position = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int32), documents.shape)
    starts = np.maximum.accumulate(np.where((documents != before) | (documents < 0), position, 0), axis=1)
    longest = int((position - starts).max()) + 1
    return starts.astype(np.int32), -(-longest // 64) * 64

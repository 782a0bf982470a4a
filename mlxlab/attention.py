"""What a block gets for one stream: mask, position, and a cache object of mlx-lm's protocol.

Sharing a prompt is a differentiable prompt cache. The prompt stream runs first inside each block and its keys and
values are captured; a stream that continues it gets them in front of its own. Positions, windows and grouped heads
need nothing new, and full attention keeps mask="causal", which MLX aligns to the last key when there are fewer queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

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
    """Attention of one stream whose first token stands at `offset`."""

    length: int
    offset: int = 0
    cache: Any = None

    def mask(self, window: int | None = None) -> mx.array | str | None:
        total = self.offset + self.length
        if window is not None and total > window:
            return create_causal_mask(self.length, offset=self.offset, window_size=window)
        return "causal" if self.length > 1 else None

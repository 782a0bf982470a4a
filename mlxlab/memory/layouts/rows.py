"""Shared by layouts: padding to one array, and the scored positions of a batch."""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import numpy as np

from mlxlab import backend
from mlxlab.interfaces import Example, SpanRows


def multiple(tokens: int) -> int:
    """What the length of a stream of about `tokens` is a multiple of.

    Long streams get lengths that GPU kernels are made for (odd ones cost a fused attention backward on CUDA), and few
    different ones, so that compiled code is used again: at most 1/16 more tokens, at most 16 lengths per doubling.
    Short ones are rounded on a GPU only: a CPU neither compiles nor cares.
    """
    if tokens < 512:
        return 1 if backend.device() == "cpu" else 16
    return max(64, 1 << (tokens.bit_length() - 5))


def pad(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Right-padded with 0 to int32 [B, T]. Causal attention hides the padding from every real token."""
    longest = max(map(len, sequences))
    out = np.zeros((len(sequences), -(-longest // multiple(longest)) * multiple(longest)), np.int32)
    for row, sequence in enumerate(sequences):
        out[row, : len(sequence)] = sequence
    return out


def span_rows(
    batch: Sequence[Example],
    spans: Mapping[str, frozenset[str]],
    locate: Callable[[int, str, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> list[SpanRows]:
    """Scored positions of all spans. A token at t is predicted from the hidden state at t - 1.

    Args:
        locate: (row of the batch, branch, positions [m]) -> (stream numbers [m], flat indices [m]).
    """
    result = []
    for branch, parts in spans.items():
        for part in sorted(parts):
            columns = []
            for row, example in enumerate(batch):
                sequence = example.branches[branch]
                wanted = sequence.response if part == "response" else ~sequence.response
                targets = np.flatnonzero(wanted[1:]) + 1
                stream, index = locate(row, branch, targets - 1)
                columns.append((stream, index, sequence.ids[targets], np.full(len(targets), row)))
            merged = [np.concatenate(column).astype(np.int32) for column in zip(*columns)]
            result.append(SpanRows(branch, part, *merged))
    return result

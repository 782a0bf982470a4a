"""Every branch is a stream of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from mlxlab.interfaces import Example, Layout, Stream, StreamPlan
from mlxlab.memory.layouts.rows import pad, span_rows


@dataclass(frozen=True)
class Separate(Layout):
    """One right-padded stream [B, T] per branch; the last token of a sequence is never an input."""

    def plan(self, batch: Sequence[Example], spans: Mapping[str, frozenset[str]]) -> StreamPlan:
        rows = tuple(range(len(batch)))
        streams = {name: Stream(pad([e.branches[name].ids[:-1] for e in batch]), rows) for name in spans}
        numbers = {name: number for number, name in enumerate(streams)}

        def locate(row, branch, positions):
            width = streams[branch].ids.shape[1]
            return np.full(len(positions), numbers[branch]), row * width + positions

        return StreamPlan(
            streams=streams,
            groups=[(name,) for name in streams],
            spans=span_rows(batch, spans, locate),
            batch_rows=len(batch),
            tokens=sum(len(e.branches[name]) - 1 for e in batch for name in spans),
        )

"""Short sequences lie one behind the other in rows of equal length, instead of each in a padded row of its own.

Attention stays inside a sequence (`Stream.documents`). Positions do not start again: rotary positions enter a score as
the distance between query and key only (Su et al., 2021, eq. 16), and all tokens of a sequence are moved alike. What
remains is the rounding of larger angles, as at the end of an unpacked row of that length. A family whose layers know
positions in another way, or whose tokens meet outside of attention, lacks the feature "packing" and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import numpy as np

from mlxlab.interfaces import Example, Layout, Problem, Setup, Stream, StreamPlan
from mlxlab.memory.layouts.rows import multiple, span_rows


@dataclass(frozen=True)
class Packed(Layout):
    """All branches of all rows of a micro-batch in one stream; each goes, longest first, where it fits first.

    (First-fit decreasing needs at most 11/9 of the fewest rows possible, and 4 more; Johnson, 1973.)

    Args:
        pack_tokens: length of a row in tokens, >= 2; a longer sequence makes all rows as long as it is. null: as long
            as the longest sequence of the micro-batch.
    """

    pack_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pack_tokens is not None and self.pack_tokens < 2:
            raise ValueError(f"pack_tokens must be >= 2 or null (the longest sequence), got {self.pack_tokens}")

    def check(self, setup: Setup) -> Iterable[Problem]:
        if setup.family is not None and "packing" not in setup.family.features:
            yield Problem(
                f"memory.layout=packed {setup.family.without('packing')}",
                "use memory.layout=separate",
            )
        if setup.batch_size * len(setup.method.branches) == 1:
            yield Problem(
                "memory.layout=packed packs the sequences of a micro-batch, and train.batch_size=1 makes one of them",
                "raise train.batch_size, or use memory.layout=separate",
            )

    def plan(self, batch: Sequence[Example], spans: Mapping[str, frozenset[str]]) -> StreamPlan:
        # the last token of a sequence is never an input
        inputs = {(row, branch): e.branches[branch].ids[:-1] for row, e in enumerate(batch) for branch in spans}
        longest = max(map(len, inputs.values()))
        bins = _first_fit_decreasing(inputs, max(longest, self.pack_tokens or 0))
        fullest = max(sum(len(inputs[item]) for item in items) for items in bins)
        width = -(-fullest // multiple(fullest)) * multiple(fullest)
        ids = np.zeros((len(bins), width), np.int32)
        documents = np.full((len(bins), width), -1, np.int32)
        place: dict[tuple[int, str], int] = {}  # flat index of a sequence's first token
        for b, items in enumerate(bins):
            used = 0
            for number, item in enumerate(items):
                end = used + len(inputs[item])
                ids[b, used:end], documents[b, used:end] = inputs[item], number
                place[item], used = b * width + used, end

        def locate(row, branch, positions):
            return np.zeros(len(positions), np.int64), place[row, branch] + positions

        return StreamPlan(
            streams={"packed": Stream(ids, (), documents=documents)},
            groups=[("packed",)],
            spans=span_rows(batch, spans, locate),
            batch_rows=len(batch),
            tokens=sum(map(len, inputs.values())),
        )


def _first_fit_decreasing(inputs: Mapping[tuple[int, str], np.ndarray], capacity: int) -> list[list[tuple[int, str]]]:
    bins: list[list[tuple[int, str]]] = []
    room: list[int] = []
    for item in sorted(inputs, key=lambda item: -len(inputs[item])):
        needed = len(inputs[item])
        b = next((b for b, left in enumerate(room) if left >= needed), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(capacity)
        bins[b].append(item)
        room[b] -= needed
    return bins

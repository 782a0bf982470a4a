"""The tokens that the branches of a row have in common go through the blocks once.

A row of P common and R1, R2 further tokens costs P + R1 + R2 instead of 2 P + R1 + R2, in time and activations. The
common part is a stream of its own; the branches continue it through its keys and values (see `mlxlab.attention`).

Rows of a micro-batch whose common parts are about equally long form one group: it shares as many tokens as its
shortest common part, and what is common beyond that goes through the branches. So nothing needs padding on the left,
and attention keeps mask="causal".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import numpy as np

from mlxlab.interfaces import Example, Layout, Problem, Setup, Stream, StreamPlan
from mlxlab.memory.layouts.rows import multiple, pad, span_rows

_TOLERATED = 1.25  # a row joins a group if its common part is at most this much longer than the group's


@dataclass(frozen=True)
class PrefixShared(Layout):
    """Shares the longest common beginning of all branches of a row (usually the prompt)."""

    def check(self, setup: Setup) -> Iterable[Problem]:
        method = setup.method
        if len(method.branches) < 2:
            yield Problem(
                f"memory.layout=prefix_shared shares a prompt between branches, and this method has one "
                f"({method.branches[0]})",
                "use memory.layout=separate",
            )
        if setup.family is not None and "prefix_cache" not in setup.family.features:
            yield Problem(
                f"memory.layout=prefix_shared {setup.family.without('prefix_cache')}",
                "use memory.layout=separate",
            )

    def plan(self, batch: Sequence[Example], spans: Mapping[str, frozenset[str]]) -> StreamPlan:
        common = [_common_tokens(example, spans) for example in batch]
        groups: list[list[int]] = []
        for row in sorted(range(len(batch)), key=lambda row: common[row]):
            if groups and common[row] <= _TOLERATED * common[groups[-1][0]]:
                groups[-1].append(row)
            else:
                groups.append([row])

        streams: dict[str, Stream] = {}
        names: list[tuple[str, ...]] = []
        place: dict[tuple[int, str], tuple[int, int]] = {}  # (row, stream name) -> (stream number, first flat index)
        shared_of: dict[int, tuple[str, int]] = {}
        suffix = {}
        for number, rows in enumerate(groups):
            # the shared part cannot be padded, so it is cut to a good length and the rest goes through the branches
            shared = common[rows[0]] // multiple(common[rows[0]]) * multiple(common[rows[0]])
            parent = f"shared_{number}" if shared else None
            members = []
            if shared:
                branch = next(iter(spans))
                streams[parent] = Stream(pad([batch[r].branches[branch].ids[:shared] for r in rows]), tuple(rows))
                members.append(parent)
            for branch in spans:
                name = f"{branch}_{number}"
                ids = pad([batch[r].branches[branch].ids[shared:-1] for r in rows])
                streams[name] = Stream(ids, tuple(rows), parent)
                members.append(name)
            names.append(tuple(members))
            for row in rows:
                shared_of[row], suffix[row] = (parent, shared), f"_{number}"
        for number, (name, stream) in enumerate(streams.items()):
            for b, row in enumerate(stream.rows):
                place[row, name] = number, b * stream.ids.shape[1]

        def locate(row, branch, positions):
            parent, shared = shared_of[row]
            own, own_start = place[row, branch + suffix[row]]
            if not shared:
                return np.full(len(positions), own), own_start + positions
            above, above_start = place[row, parent]
            inside = positions < shared
            index = np.where(inside, above_start + positions, own_start + positions - shared)
            return np.where(inside, above, own), index

        return StreamPlan(
            streams=streams,
            groups=names,
            spans=span_rows(batch, spans, locate),
            batch_rows=len(batch),
            tokens=sum(
                shared_of[row][1] + sum(len(e.branches[b]) - 1 - shared_of[row][1] for b in spans)
                for row, e in enumerate(batch)
            ),
        )


def _common_tokens(example: Example, spans: Mapping[str, frozenset[str]]) -> int:
    """Length of the common beginning of a row's branches; each keeps at least one input token of its own."""
    ids = [example.branches[branch].ids for branch in spans]
    limit = max(0, min(map(len, ids)) - 2)
    first = ids[0][:limit]
    differs = np.zeros(limit, bool)
    for other in ids[1:]:
        differs |= first != other[:limit]
    return int(np.argmax(differs)) if differs.any() else limit

"""Layouts: which tokens go through the blocks, and which rows are scored."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlab.interfaces import Example, TokenSequence, Totals
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft

SPANS = Orpo().spans()


def pair(prompt, chosen, rejected):
    def sequence(response):
        ids = np.array([*prompt, *response], np.int32)
        return TokenSequence(ids, np.arange(len(ids)) >= len(prompt))

    return Example({"chosen": sequence(chosen), "rejected": sequence(rejected)})


def scored(plan):
    """(branch, part, row of the batch, tokens seen before the position, target), read back through the streams."""
    names = list(plan.streams)
    result = []
    for span in plan.spans:
        for number, index, target, row in zip(span.stream, span.index, span.target, span.row):
            stream = plan.streams[names[number]]
            b, t = divmod(int(index), stream.ids.shape[1])
            assert stream.rows[b] == row
            seen = stream.ids[b, : t + 1].tolist()
            while stream.parent is not None:
                stream = plan.streams[stream.parent]
                seen = stream.ids[b].tolist() + seen
            result.append((span.branch, span.part, int(row), tuple(seen), int(target)))
    return sorted(result)


BATCHES = {
    "equal prompts": [pair([1, 2, 3], [4, 5], [6, 7, 8]), pair([9, 8, 7], [1], [2])],
    "unequal prompts": [pair([1] * 12, [4, 5], [6]), pair([2] * 5, [1, 1], [2]), pair([3] * 13, [5], [6, 7])],
    "same first response token": [pair([1, 2], [5, 6, 7], [5, 8])],
    "nothing in common": [pair([1], [2], [3])],
    "no prompt": [pair([], [1, 2, 3], [4, 5])],
    "one response begins the other": [pair([1, 2], [5, 6], [5, 6, 7, 8])],
}


@pytest.mark.parametrize("batch", list(BATCHES.values()), ids=list(BATCHES))
def test_sharing_scores_exactly_what_separate_streams_score(batch):
    separate, shared = Separate().plan(batch, SPANS), PrefixShared().plan(batch, SPANS)
    assert scored(shared) == scored(separate)
    expected = Totals.of(batch, SPANS)
    assert {(s.branch, s.part): len(s.target) for s in shared.spans} == expected.tokens
    assert shared.tokens <= separate.tokens
    assert sorted(name for group in shared.groups for name in group) == sorted(shared.streams)


def test_cost_of_a_shared_prompt():
    prompt, batch = list(range(1, 513)), []
    batch.append(pair(prompt, [1] + [600] * 63, [2] + [601] * 79))
    assert PrefixShared().plan(batch, SPANS).streams["shared_0"].ids.shape == (1, 512)
    assert Separate().plan(batch, SPANS).tokens == (512 + 63) + (512 + 79)
    assert PrefixShared().plan(batch, SPANS).tokens == 512 + 63 + 79


def test_rows_share_a_group_only_when_their_common_parts_are_alike():
    batch = [pair([1] * n, [2, 4], [3, 4]) for n in (100, 110, 10)]
    plan = PrefixShared().plan(batch, SPANS)
    assert [plan.streams[group[0]].rows for group in plan.groups] == [(2,), (0, 1)]
    assert plan.streams["shared_1"].ids.shape == (2, 100)


def test_padding_is_never_scored():
    """Two rows of 9 tokens, prompt 6: three targets each, although arrays are wider for other rows."""
    rows = [np.arange(3, 12), np.arange(20, 29), np.arange(0, 30)]
    batch = [Example({"completion": TokenSequence(ids.astype(np.int32), np.arange(len(ids)) >= 6)}) for ids in rows]
    plan = Separate().plan(batch, Sft().spans())
    span = plan.spans[0]
    assert plan.streams["completion"].ids.shape == (3, 29)
    assert [list(span.target[span.row == r]) for r in (0, 1)] == [[9, 10, 11], [26, 27, 28]]
    assert plan.tokens == 8 + 8 + 29


def test_long_streams_have_few_lengths():
    """At least 1/17 of a stream is real, and attention kernels get multiples of 64."""
    lengths = set()
    for tokens in range(512, 16384):
        batch = [Example({"completion": TokenSequence(np.zeros(tokens + 1, np.int32), np.ones(tokens + 1, bool))})]
        width = Separate().plan(batch, {"completion": frozenset()}).streams["completion"].ids.shape[1]
        assert width % 64 == 0 and tokens <= width <= tokens * 17 / 16 + 64
        lengths.add(width)
    assert len(lengths) <= 16 * 5 + 1


def test_the_shared_part_of_a_long_prompt_has_a_good_length():
    batch = [pair(list(range(1000)), [1] * 5, [2] * 5)]
    plan = PrefixShared().plan(batch, SPANS)
    assert plan.streams["shared_0"].ids.shape == (1, 960)
    assert scored(plan) == scored(Separate().plan(batch, SPANS))

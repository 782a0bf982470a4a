"""Layouts: which tokens go through the blocks, and which rows are scored."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlab.attention import document_starts
from mlxlab.interfaces import Example, TokenSequence, Totals
from mlxlab.memory.layouts.packed import Packed
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
            assert not stream.rows or stream.rows[b] == row
            seen = stream.ids[b, : t + 1].tolist()
            if stream.documents is not None:
                assert stream.documents[b, t] >= 0
                seen = [i for i, d in zip(seen, stream.documents[b]) if d == stream.documents[b, t]]
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


@pytest.mark.parametrize("pack_tokens", [None, 2, 40])
@pytest.mark.parametrize("batch", list(BATCHES.values()), ids=list(BATCHES))
def test_packing_scores_exactly_what_separate_streams_score(batch, pack_tokens):
    separate, packed = Separate().plan(batch, SPANS), Packed(pack_tokens).plan(batch, SPANS)
    assert scored(packed) == scored(separate)
    assert packed.tokens == separate.tokens
    assert {(s.branch, s.part): len(s.target) for s in packed.spans} == Totals.of(batch, SPANS).tokens


def lengths(*tokens):
    """One row of so many input tokens each."""
    rows = [np.arange(1, n + 2, dtype=np.int32) for n in tokens]
    return [Example({"completion": TokenSequence(ids, np.ones(len(ids), bool))}) for ids in rows]


def test_rows_are_filled_longest_first_where_they_fit_first():
    stream = Packed().plan(lengths(3, 7, 4, 10, 6), Sft().spans()).streams["packed"]
    assert stream.ids.shape == (3, 10)
    assert stream.documents.tolist() == [[0] * 10, [0] * 7 + [1] * 3, [0] * 6 + [1] * 4]
    assert stream.ids[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert Packed(16).plan(lengths(3, 7, 4, 10, 6), Sft().spans()).streams["packed"].ids.shape == (2, 16)
    assert Packed(5).plan(lengths(3, 7), Sft().spans()).streams["packed"].ids.shape == (2, 7)


def test_rows_are_no_wider_than_their_content_and_long_ones_have_good_lengths():
    assert Packed(1000).plan(lengths(3, 7), Sft().spans()).streams["packed"].ids.shape == (1, 10)
    stream = Packed(2048).plan(lengths(700, 500), Sft().spans()).streams["packed"]
    assert stream.ids.shape == (1, 1216)
    assert (stream.documents[0, 1200:] == -1).all()


def test_starts_of_documents():
    documents = np.array([[0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]], np.int32)
    starts, longest = document_starts(documents)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 6], [0] * 7] and starts.dtype == np.int32
    assert longest == 64 and document_starts(np.zeros((1, 65), np.int32))[1] == 128
    assert document_starts(None) == (None, None)


def test_packing_pays():
    """A third of the tokens of padded rows, in this batch."""
    batch = lengths(100, 20, 20, 20, 20, 20)
    padded = Separate().plan(batch, Sft().spans()).streams["completion"].ids.size
    assert Packed().plan(batch, Sft().spans()).streams["packed"].ids.size * 3 == padded


def test_a_row_of_one_token_is_refused():
    with pytest.raises(ValueError, match="pack_tokens must be >= 2 or null .*got 1"):
        Packed(1)

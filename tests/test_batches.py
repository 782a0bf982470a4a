"""Batches: every row once per epoch, similar lengths together, still random, resumable, and nothing read too early."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from mlxlab.data.batches import Batches, length, padded_tokens, rounded
from mlxlab.interfaces import Example, TokenSequence
from mlxlab.optim import OptimConfig
from mlxlab.samples import prompts_of
from mlxlab.settings import TrainConfig


def example(name, *lengths):
    branches = {f"b{i}": TokenSequence(np.arange(n), np.ones(n, bool)) for i, n in enumerate(lengths)}
    return Example(branches, str(name))


def rows(count, seed=0, longest=300, branches=1):
    lengths = np.random.default_rng(seed).integers(2, longest, (count, branches))
    return [example(i, *lengths[i]) for i in range(count)]


def names(batches):
    return [tuple(e.source for e in batch) for batch in batches]


class Lazy(Sequence):
    """Rows that are made when they are asked for; remembers which."""

    def __init__(self, lengths):
        self.lengths, self.read = np.array(lengths), []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        assert type(index) is int, f"asked for {index!r}"
        self.read.append(index)
        return example(index, self.lengths[index])

    def __iter__(self):
        raise AssertionError("all rows were asked for")


SIZES = [{"batch_size": 4}, {"batch_size": None, "batch_tokens": 900}]


@pytest.mark.parametrize("size", SIZES, ids=["rows", "tokens"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_once_per_epoch(size, shuffle):
    data = rows(101, branches=2)
    batches = Batches(data, seed=0, shuffle=shuffle, **size)
    for _ in range(3):
        taken = batches.take(batches.batches_per_epoch)
        assert sorted(e.source for batch in taken for e in batch) == sorted(e.source for e in data)
        assert batches.position["batch"] == 0
    assert names(batches.epoch(0)) != names(batches.epoch(1)) or not shuffle
    assert shuffle or names(batches.epoch(0)) == names(batches.epoch(7))


def test_rows_are_counted_by_tokens():
    """5 x 8 fit 40 tokens, 2 x 2 x 8 with two branches; a row beyond the limit is a batch of its own."""
    sizes = lambda data, limit: sorted(map(len, Batches(data, None, 0, batch_tokens=limit).epoch()))
    assert sizes([example(i, 8) for i in range(12)], 40) == [2, 5, 5]
    assert sizes([example(i, 8, 5) for i in range(5)], 40) == [1, 2, 2]
    assert sizes([example(0, 400), example(1, 300), example(2, 8), example(3, 8)], 40) == [1, 1, 2]
    assert sizes([example(i, 100) for i in range(3)], 40) == [1, 1, 1]


def test_batches_are_as_full_as_they_can_be():
    data = rows(2000, longest=1000)
    batches = list(Batches(data, None, 0, batch_tokens=4096).epoch())
    filled = [len(batch) * rounded(np.array([max(map(length, batch))]))[0] for batch in batches]
    assert max(filled) <= 4096
    assert np.mean(filled) > 0.8 * 4096
    assert sum(map(padded_tokens, batches)) < 1.05 * sum(map(length, data))


@pytest.mark.parametrize("size", SIZES, ids=["rows", "tokens"])
def test_partners_change_and_lengths_stay_similar(size):
    data = rows(400)
    batches = Batches(data, seed=0, **size)
    partners: dict[str, set] = {}
    for epoch in range(6):
        for batch in batches.epoch(epoch):
            for e in batch:
                partners.setdefault(e.source, set()).update(o.source for o in batch)
    # a batch of 4 that never changed would have 4 names
    assert np.mean([len(names) for names in partners.values()]) > 8
    order = [max(map(length, batch)) for batch in batches.epoch()]
    assert abs(np.corrcoef(order, range(len(order)))[0, 1]) < 0.3
    assert sum(map(padded_tokens, batches.epoch())) < 1.1 * sum(map(length, data))


def test_lengths_of_the_report_about_sorting():
    """12, 400, 82, 180, 26, 390, 90, 170 tokens in pairs: 1392 padded tokens for 1350 real ones, in every epoch."""
    data = [example(i, n) for i, n in enumerate((12, 400, 82, 180, 26, 390, 90, 170))]
    for seed in range(5):
        batches = Batches(data, 2, seed)
        assert [sum(map(padded_tokens, batches.epoch(epoch))) for epoch in range(3)] == [1392] * 3


def test_lengths_are_rounded_to_few_values():
    assert rounded(np.array([1, 4, 5, 63, 64, 65, 127, 128, 129, 511, 512, 513])).tolist() == [
        4, 4, 8, 64, 64, 68, 128, 128, 136, 512, 512, 544,
    ]  # fmt: skip
    values = rounded(np.arange(1, 2**16 + 1))
    assert (values >= np.arange(1, 2**16 + 1)).all() and len(np.unique(values)) == 16 + 10 * 16
    assert ((values - np.arange(1, 2**16 + 1)) <= np.maximum(3, np.arange(1, 2**16 + 1) / 16)).all()


def test_few_shapes():
    """Their number is bounded by the lengths that there are, not by the number of rows."""
    shapes = lambda count: {
        (len(batch), int(rounded(np.array([max(map(length, batch))]))[0]))
        for epoch in range(3)
        for batch in Batches(rows(count, longest=500), None, 0, batch_tokens=2048).epoch(epoch)
    }
    lengths = len(np.unique(rounded(np.arange(1, 500))))
    assert len(shapes(500)) <= 2 * lengths and len(shapes(8000)) <= 2 * lengths


@pytest.mark.parametrize("size", SIZES, ids=["rows", "tokens"])
def test_order_depends_on_the_seed_only(size):
    data = rows(50)
    first = names(Batches(data, seed=0, **size).take(30))
    np.random.seed(5)
    np.random.random(7)
    assert names(Batches(data, seed=0, **size).take(30)) == first
    assert names(Batches(data, seed=1, **size).take(30)) != first


@pytest.mark.parametrize("size", SIZES, ids=["rows", "tokens"])
@pytest.mark.parametrize("taken", [0, 1, 13, 14, 40])
def test_a_position_continues(size, taken):
    data = rows(53)
    batches = Batches(data, seed=3, **size)
    batches.take(taken)
    position = json.loads(json.dumps(batches.position))
    rest = names(batches.take(30))
    other = Batches(data, seed=3, **size)
    other.position = position
    assert names(other.take(30)) == rest


def test_only_the_rows_of_a_batch_are_read():
    lazy = Lazy(np.random.default_rng(0).integers(2, 300, 1000))
    [batch] = Batches(lazy, 3, seed=0).take(1)
    assert sorted(lazy.read) == sorted(int(e.source) for e in batch) and len(batch) == 3
    lazy.read.clear()
    [batch] = Batches(lazy, None, seed=0, batch_tokens=600).take(1)
    assert set(lazy.read) == {0, *(int(e.source) for e in batch)}  # the first row tells the branches


def test_no_row_is_read_for_prompts_that_are_not_shown():
    class Prompted(Lazy):
        def __getitem__(self, index):
            sequence = super().__getitem__(index).branches["b0"]
            return Example({"b0": TokenSequence(sequence.ids, sequence.ids > 3 * (index % 2))})

    lazy = Prompted([9] * 100)
    assert prompts_of(lazy, "b0", 2) == [[0], [0, 1, 2, 3]] and lazy.read == [0, 1]
    assert prompts_of(lazy, "b0", 0) == [] and lazy.read == [0, 1]


def test_the_fingerprint_tells_rows_apart():
    mark = lambda lengths: Batches(Lazy(lengths), 2, seed=0).fingerprint
    assert mark([5, 6, 7]) == mark([5, 6, 7]) == Batches([example(n, n) for n in (5, 6, 7)], 1, 1).fingerprint
    assert len({mark([5, 6, 7]), mark([6, 5, 7]), mark([5, 6]), mark([5, 6, 8])}) == 4


@pytest.mark.parametrize("size", [(None, None), (2, 100), (0, None), (None, 0)])
def test_one_of_two_sizes(size):
    with pytest.raises(ValueError, match="one of batch_size and batch_tokens >= 1"):
        Batches(rows(3), size[0], 0, batch_tokens=size[1])


# ------------------------------------------------------------------------------------------------------------- options
def test_batch_size_is_2_unless_tokens_decide():
    assert TrainConfig().batch_size == 2 and TrainConfig(batch_size=5).batch_size == 5
    assert TrainConfig(batch_tokens=100).batch_size is None


@pytest.mark.parametrize("options, sentence", [
    ({"batch_size": 2, "batch_tokens": 100}, "batch_size=2 and batch_tokens=100 both give the size of a micro-batch"),
    ({"batch_tokens": 0}, "batch_tokens must be >= 1, got 0"),
    ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
    ({"early_stop_patience": -1}, "early_stop_patience must be >= 0, got -1"),
    ({"early_stop_patience": 2, "validate_every": 0}, "validate_every=0 makes none during training"),
    ({"samples": 0, "sample_tokens": 9}, "sample_tokens=9 has no effect with samples=0"),
    ({"resume": ""}, "resume must not be empty"),
    ({"best_metric": ""}, "best_metric must not be empty"),
])  # fmt: skip
def test_options_of_training_that_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**options)


@pytest.mark.parametrize("options, updates, valid, sentence", [
    ({"checkpoint_every": 9}, 8, 5, "train.checkpoint_every=9 is more than the 8 updates of this run"),
    ({"validate_rows": 3}, 8, 0, "train.validate_rows=3 needs validation rows, and there are none"),
    ({"best_metric": "nll"}, 8, 0, "train.best_metric=nll needs validation rows"),
    ({"early_stop_patience": 1, "validate_every": 4}, 8, 0, "train.early_stop_patience=1 needs validation rows"),
    ({"early_stop_patience": 2, "validate_every": 4}, 8, 5, "could end training after 8 updates at the earliest"),
])  # fmt: skip
def test_options_without_effect(options, updates, valid, sentence):
    [found] = TrainConfig(**options).without_effect(updates, valid)
    assert sentence in found
    assert not list(TrainConfig(**options).without_effect(50, 5))
    assert not list(TrainConfig().without_effect(updates, valid))


def test_a_constant_rate_has_no_final_ratio():
    with pytest.raises(ValueError, match="final_ratio=0.5 has no effect with schedule=constant"):
        OptimConfig(learning_rate=1e-3, schedule="constant", final_ratio=0.5)
    assert OptimConfig(learning_rate=1e-3, schedule="constant").final_ratio == 0.1

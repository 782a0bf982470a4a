"""The order of training: batches of similar length, every row once per epoch, a pure function of seed and epoch."""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

import numpy as np

from mlxlab.interfaces import Example


def length(example: Example) -> int:
    """Tokens of the longest branch."""
    return max(map(len, example.branches.values()))


class Batches:
    """Micro-batches without end.

    Rows are sorted by length and cut into batches; one batch of an epoch may be smaller, no row is left out. Rows of
    equal length change places, batches change their order and the smaller batch its rows from epoch to epoch.

    Args:
        examples: the rows.
        batch_size: rows per micro-batch.
        seed: of the order; 0 is a seed like any other.
        shuffle: False keeps the order of `examples`, for validation.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int, shuffle: bool = True):
        if not examples or batch_size < 1 or seed < 0:
            raise ValueError(
                f"examples must not be empty, batch_size >= 1 and seed >= 0, got {len(examples)} examples, "
                f"batch_size={batch_size}, seed={seed}"
            )
        self._examples, self._size, self._seed, self._shuffle = examples, batch_size, seed, shuffle
        self._lengths = np.array([length(example) for example in examples])
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self._cached: tuple[int, list[np.ndarray]] | None = None  # order of the epoch that was asked for last
        self.position = {"epoch": 0, "batch": 0}

    @property
    def position(self) -> dict[str, int]:
        """Epoch and batch in it, both from 0, of the next batch; may be set to continue a run."""
        return dict(self._position)

    @position.setter
    def position(self, value: Mapping[str, int]) -> None:
        if value["epoch"] < 0 or not 0 <= value["batch"] < self.batches_per_epoch:
            raise ValueError(
                f"position must have epoch >= 0 and 0 <= batch < {self.batches_per_epoch}, got {dict(value)}; it "
                "belongs to other rows or another batch size"
            )
        self._position = dict(value)

    def take(self, count: int) -> list[list[Example]]:
        """The next `count` batches."""
        result = []
        for _ in range(count):
            epoch, batch = self._position["epoch"], self._position["batch"]
            result.append(self._rows(self._order(epoch)[batch]))
            last = batch + 1 == self.batches_per_epoch
            self._position = {"epoch": epoch + last, "batch": 0 if last else batch + 1}
        return result

    def epoch(self, number: int = 0) -> Iterator[list[Example]]:
        """All batches of one epoch."""
        return (self._rows(batch) for batch in self._order(number))

    def _rows(self, indices: np.ndarray) -> list[Example]:
        return [self._examples[i] for i in indices]

    def _order(self, epoch: int) -> list[np.ndarray]:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._make_order(epoch)
        return self._cached[1]

    def _make_order(self, epoch: int) -> list[np.ndarray]:
        rows = np.arange(len(self._examples))
        if not self._shuffle:
            return np.split(rows, range(self._size, len(rows), self._size))
        rng = np.random.default_rng([self._seed, epoch])
        rng.shuffle(rows)
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        sizes = [self._size] * (len(rows) // self._size)
        if rest := len(rows) % self._size:
            sizes.insert(rng.integers(len(sizes) + 1), rest)  # at the end it would always have the longest rows
        batches = np.split(rows, np.cumsum(sizes)[:-1])
        return [batches[i] for i in rng.permutation(len(batches))]


def padded_tokens(batch: Sequence[Example]) -> int:
    """Tokens of a batch whose branches are each padded to their longest row."""
    return sum(len(batch) * max(len(example.branches[name]) for example in batch) for name in batch[0].branches)

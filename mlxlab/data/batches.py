"""The order of training: batches of similar length, every row once per epoch, a pure function of seed and epoch."""

from __future__ import annotations

from functools import lru_cache
from typing import Iterator, Sequence

import numpy as np

from mlxlab.interfaces import Example


def length(example: Example) -> int:
    """Tokens of the longest branch."""
    return max(map(len, example.branches.values()))


class Batches:
    """Micro-batches without end.

    Rows are sorted by length and cut into batches; the last batch of an epoch may be smaller, no row is left out.
    Rows of equal length change places and batches change their order from epoch to epoch.

    Args:
        examples: the rows.
        batch_size: rows per micro-batch.
        seed: of the order; 0 is a seed like any other.
        shuffle: False keeps the order of `examples`, for validation.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int, shuffle: bool = True):
        self._examples, self._size, self._seed, self._shuffle = examples, batch_size, seed, shuffle
        self._lengths = np.array([length(example) for example in examples])
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self.position = {"epoch": 0, "batch": 0}  # of the next batch; may be set to continue a run

    def take(self, count: int) -> list[list[Example]]:
        """The next `count` batches."""
        result = []
        for _ in range(count):
            order = self._order(self.position["epoch"])
            result.append(self._rows(order[self.position["batch"]]))
            self.position["batch"] += 1
            if self.position["batch"] == len(order):
                self.position = {"epoch": self.position["epoch"] + 1, "batch": 0}
        return result

    def epoch(self, number: int = 0) -> Iterator[list[Example]]:
        """All batches of one epoch."""
        return (self._rows(batch) for batch in self._order(number))

    def _rows(self, indices: np.ndarray) -> list[Example]:
        return [self._examples[i] for i in indices]

    @lru_cache(maxsize=2)
    def _order(self, epoch: int) -> list[np.ndarray]:
        rows = np.arange(len(self._examples))
        if not self._shuffle:
            return np.split(rows, range(self._size, len(rows), self._size))
        rng = np.random.default_rng([self._seed, epoch])
        rng.shuffle(rows)
        rows = rows[np.argsort(self._lengths[rows], kind="stable")]
        batches = np.split(rows, range(self._size, len(rows), self._size))
        return [batches[i] for i in rng.permutation(len(batches))]

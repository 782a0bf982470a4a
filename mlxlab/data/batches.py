"""The order of training: batches of similar length, every row once per epoch, a pure function of seed and epoch.

Rows only need `len(rows)`, `rows[i]` and, if they are not a plain list, `rows.lengths`: tokens of the longest branch of
each row, an array [n]. So nothing here reads a row before its turn.

Randomness: rows are shuffled, then sorted by rounded length. So rows of about equal length (a window of 1/16, or of 4
tokens) change partners from epoch to epoch. The batches are shuffled last, so that short and long ones alternate.

Shapes: a batch has `batch_size` rows, or as many as fit at its rounded length, of which there are at most 16 per
doubling (one batch between two lengths may have a number between theirs). The tokens of a stream are up to the layout,
which rounds long ones similarly. So the number of shapes [rows, tokens] does not grow with the number of rows.
"""

from __future__ import annotations

import hashlib
from typing import Iterator, Mapping, Sequence

import numpy as np

from mlxlab.interfaces import Example


def length(example: Example) -> int:
    """Tokens of the longest branch."""
    return max(map(len, example.branches.values()))


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """Tokens of the longest branch of each row, int64 [n]; rows are read only if they do not know it."""
    known = getattr(examples, "lengths", None)
    return np.asarray([length(example) for example in examples] if known is None else known, np.int64)


def rounded(lengths: np.ndarray) -> np.ndarray:
    """Lengths rounded up to a multiple of 4, or of 1/16 of the power of two below them: few different values."""
    powers = np.frexp(np.maximum(lengths, 1).astype(np.float64))[1]
    step = np.maximum(4, 1 << np.maximum(powers - 5, 0))
    return -(-lengths // step) * step


class Batches:
    """Micro-batches without end.

    Rows are sorted by rounded length and cut into batches of `batch_size` rows, or of as many rows as have at most
    `batch_tokens` tokens. One batch of an epoch may be smaller for want of rows; no row is left out.

    Args:
        examples: the rows (see above).
        batch_size: rows per micro-batch; None with `batch_tokens`.
        seed: of the order; 0 is a seed like any other.
        shuffle: False: nothing is random, all epochs are equal; for validation.
        batch_tokens: limit of rows times branches times rounded length of the longest row. A row that is longer alone
            is a batch of its own.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int | None,
        seed: int,
        shuffle: bool = True,
        batch_tokens: int | None = None,
    ):
        size = batch_size if batch_tokens is None else batch_tokens
        if not len(examples) or size is None or size < 1 or seed < 0 or None not in (batch_size, batch_tokens):
            raise ValueError(
                f"examples must not be empty, one of batch_size and batch_tokens >= 1 and seed >= 0, got "
                f"{len(examples)} examples, batch_size={batch_size}, batch_tokens={batch_tokens}, seed={seed}"
            )
        self._examples, self._size, self._seed, self._shuffle = examples, batch_size, seed, shuffle
        lengths = lengths_of(examples)
        self._rounded = rounded(lengths)
        self.fingerprint = hashlib.sha256(lengths.tobytes()).hexdigest()[:16]
        self._sizes = self._rows_per_batch(batch_tokens)
        self.batches_per_epoch = len(self._sizes)
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
        return [self._examples[int(i)] for i in indices]

    def _order(self, epoch: int) -> list[np.ndarray]:
        epoch = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._make_order(epoch)
        return self._cached[1]

    def _make_order(self, epoch: int) -> list[np.ndarray]:
        rows = np.arange(len(self._rounded))
        rng = np.random.default_rng([self._seed, epoch])
        if self._shuffle:
            rng.shuffle(rows)
        rows = rows[np.argsort(self._rounded[rows], kind="stable")]
        sizes = list(self._sizes)
        if self._shuffle and self._size:
            # at the end the smaller batch would always have the longest rows
            sizes.insert(rng.integers(len(sizes)), sizes.pop())
        batches = np.split(rows, np.cumsum(sizes)[:-1])
        return [batches[i] for i in rng.permutation(len(batches))] if self._shuffle else batches

    def _rows_per_batch(self, batch_tokens: int | None) -> list[int]:
        """Rows of each batch, shortest rows first; the same for every epoch, since it depends on lengths only."""
        count = len(self._rounded)
        if batch_tokens is None:
            return [self._size] * (count // self._size) + [count % self._size] * (count % self._size > 0)
        branches = len(self._examples[0].branches)
        sizes, filled = [], 0
        for tokens in np.sort(self._rounded):
            if filled and (filled + 1) * branches * tokens > batch_tokens:
                sizes.append(filled)
                filled = 0
            filled += 1
        return [*sizes, filled]


def padded_tokens(batch: Sequence[Example]) -> int:
    """Tokens of a batch whose branches are each padded to their longest row."""
    return sum(len(batch) * max(len(example.branches[name]) for example in batch) for name in batch[0].branches)

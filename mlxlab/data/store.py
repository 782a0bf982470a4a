"""Token sequences in flat arrays, in memory or memory-mapped from a folder; examples are views on them.

tokens     int32 [all tokens]      learned   bool [all tokens]
offsets    int64 [sequences + 1], where each sequence begins
places     int64 [examples, 5], number of the file, of the row in it, of the answer in that (0: the whole row),
           of the first sequence, and of the set of branches
meta.json  sets of branches, names of rows, facts, size and CRC-32 of every array, and a CRC-32 of all that
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from mlxlab.data.facts import Facts
from mlxlab.interfaces import Example, TokenSequence

ARRAYS = {"tokens": np.int32, "learned": np.bool_, "offsets": np.int64, "places": np.int64}
_META, _COLUMNS = "meta.json", 5


@dataclass(frozen=True)
class Store:
    """The examples of one split of one source."""

    branches: tuple[tuple[str, ...], ...]  # sets that occur
    labels: tuple[str, ...]  # of files: name of a row, with {} for its number
    facts: Facts
    tokens: np.ndarray
    learned: np.ndarray
    offsets: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def example(self, number: int) -> Example:
        """Views, not copies: no token is read before it is used."""
        file, row, answer, first, names = map(int, self.places[number])
        branches = {}
        for position, branch in enumerate(self.branches[names], first):
            part = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
            branches[branch] = TokenSequence(self.tokens[part], self.learned[part])
        return Example(branches, self.labels[file].format(row) + (f", answer {answer}" if answer else ""))

    def lengths(self) -> np.ndarray:
        """Tokens of the longest branch of every example, int64 [examples]."""
        return np.maximum.reduceat(np.diff(self.offsets), self.places[:, 3])

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Memory-mapped from a folder that `intact` accepts."""
        meta = _read_meta(folder)
        arrays = {}
        for name, dtype in ARRAYS.items():
            path = folder / f"{name}.bin"
            # an empty file cannot be mapped
            array = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
            arrays[name] = array.view(np.ndarray)
        arrays["places"] = arrays["places"].reshape(-1, _COLUMNS)
        return cls(tuple(map(tuple, meta["branches"])), tuple(meta["labels"]), Facts.from_dict(meta["facts"]), **arrays)


class Builder:
    """Collects examples, in a folder or in memory (None), and makes a store of them."""

    def __init__(self, labels: Sequence[str], folder: Path | None = None):
        self._labels, self._folder = tuple(labels), folder
        self._files: dict[str, BinaryIO] = {
            name: (folder / f"{name}.bin").open("wb") if folder else io.BytesIO() for name in ARRAYS
        }
        self._checks = {name: [0, 0] for name in ARRAYS}  # size, CRC-32
        self._branches: list[tuple[str, ...]] = []
        self._sequences = self._end = 0
        self._write("offsets", np.zeros(1, np.int64))

    def add(self, example: Example, file: int, row: int, answer: int = 0) -> None:
        branches = tuple(example.branches)
        if branches not in self._branches:
            self._branches.append(branches)
        self._write("places", np.array([file, row, answer, self._sequences, self._branches.index(branches)]))
        self._sequences += len(branches)
        for sequence in example.branches.values():
            self._end += len(sequence)
            self._write("tokens", sequence.ids)
            self._write("learned", sequence.response)
            self._write("offsets", np.array([self._end]))

    def finish(self, facts: Facts) -> Store | None:
        """The store in memory; with a folder its last file is written, for `Store.open`."""
        if self._folder is None:
            arrays = {}
            for name, file in self._files.items():
                data = file.getbuffer()
                arrays[name] = np.frombuffer(data, ARRAYS[name]) if data.nbytes else np.empty(0, ARRAYS[name])
                arrays[name].setflags(write=False)  # as the mapped ones
            arrays["places"] = arrays["places"].reshape(-1, _COLUMNS)
            return Store(tuple(self._branches), self._labels, facts, **arrays)
        self.close()
        body = {"branches": self._branches, "labels": self._labels, "facts": facts.as_dict(), "arrays": self._checks}
        body = json.loads(json.dumps(body))
        content = json.dumps({"body": body, "crc": _crc_of(body)}, ensure_ascii=False)
        (self._folder / _META).write_text(content, encoding="utf-8")
        return None

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, array: np.ndarray) -> None:
        data = array.astype(ARRAYS[name], copy=False).tobytes()
        self._files[name].write(data)
        size, crc = self._checks[name]
        self._checks[name] = [size + len(data), zlib.crc32(data, crc)]


def intact(folder: Path) -> bool:
    """Whether every byte of a folder is what was written; reads it once, without mapping it."""
    try:
        meta = _read_meta(folder)
        return all(_check_of(folder / f"{name}.bin") == meta["arrays"][name] for name in ARRAYS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Examples(Sequence[Example]):
    """Rows of one or several stores in a given order, each made when it is asked for.

    Args:
        stores: (prefix of row names, store).
        index: int64 [n], positions in the concatenated stores; None: all in order.
    """

    def __init__(self, stores: Sequence[tuple[str, Store]], index: np.ndarray | None = None):
        self._stores = [(prefix, store) for prefix, store in stores if len(store)]
        self._starts = np.cumsum([0, *(len(store) for _, store in self._stores)])
        self._index = np.arange(self._starts[-1]) if index is None else index

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest branch, int64 [n]; reads no token."""
        longest = [store.lengths() for _, store in self._stores]
        return np.concatenate(longest or [np.empty(0, np.int64)])[self._index]

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, number: int) -> Example: ...

    @overload
    def __getitem__(self, number: slice) -> Examples: ...

    def __getitem__(self, number):
        if isinstance(number, slice):
            return Examples(self._stores, self._index[number])
        position = int(self._index[number])
        place = int(np.searchsorted(self._starts, position, side="right")) - 1
        prefix, store = self._stores[place]
        example = store.example(position - int(self._starts[place]))
        return Example(example.branches, prefix + example.source) if prefix else example


def _read_meta(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    if _crc_of(meta["body"]) != meta["crc"]:
        raise ValueError(f"{folder / _META} is damaged")
    return meta["body"]


def _crc_of(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _check_of(path: Path) -> list[int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            size, crc = size + len(data), zlib.crc32(data, crc)
    return [size, crc]

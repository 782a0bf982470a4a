"""Files of rows, read from beginning to end in bounded memory: JSON lines, a JSON array, Parquet, a hub data set.

A reader is iterable over (number from 1, value, how much of `size` was read). A row that cannot be read is a DataError
in place of its value, so that the rows after it are looked at, too. `label.format(number)` names a row.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Protocol

from mlxlab.errors import ConfigError, DataError

Row = tuple[int, Any, int]

_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "compressed with gzip",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
}
_SPACE = re.compile(r"[ \t\r\n]*")


class Reader(Protocol):
    """What all of them have."""

    name: str
    label: str  # name of a row, with {} for its number
    size: int  # in bytes or rows, for progress
    bytes: int

    def identity(self) -> list[Any]:
        """Changes whenever the rows do."""

    def __iter__(self) -> Iterator[Row]: ...


@dataclass(frozen=True)
class JsonFile:
    """JSON lines, or one array of objects: the first character decides. UTF-8, with or without a byte-order mark."""

    path: Path

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    size = bytes

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def label(self) -> str:
        return _label(self.name) if self._is_array() else f"{_escaped(self.name)}:{{}}"

    def identity(self) -> list[Any]:
        return [self.name, content_hash(self.path)]

    def __iter__(self) -> Iterator[Row]:
        array = self._is_array()
        with self.path.open("rb") as file:
            yield from self._elements(file) if array else self._lines(file)

    def _is_array(self) -> bool:
        with self.path.open("rb") as file:
            head = file.read(4096)
        what = next((what for mark, what in _ENCODINGS.items() if head.startswith(mark)), None)
        if what is None and b"\0" in head[:4]:
            what = "UTF-16 or UTF-32"
        if what:
            raise DataError(f"{self.path} is {what}, but its name says JSON, which is text in UTF-8; convert it first.")
        return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["

    def _lines(self, file: BinaryIO) -> Iterator[Row]:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                continue
            try:
                value = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
                if b"\\ud" in content.lower():  # half a surrogate pair, which JSON can spell, is no text
                    json.dumps(value, ensure_ascii=False).encode("utf-8")
            except (ValueError, RecursionError) as error:
                value = DataError(f"{self.path}, line {number}: not valid JSON in UTF-8 ({error}).")
            yield number, value, len(line)

    def _elements(self, file: BinaryIO) -> Iterator[Row]:
        """Elements of an array, of which only the piece being read is in memory."""
        decode = codecs.getincrementaldecoder("utf-8")().decode
        parse = json.JSONDecoder(object_pairs_hook=_object).raw_decode
        buffer, position, number, lines, chunk, ended = "", 0, 0, 1, 1 << 16, False
        before = True  # the opening bracket; afterwards the place where a value or a comma is expected
        wanted = "["

        def broken(reason: object) -> DataError:
            line = lines + buffer.count("\n", 0, position)
            return DataError(f"{self.path}, row {number + 1}, line {line}: not valid JSON in UTF-8 ({reason}).")

        while True:
            position = _SPACE.match(buffer, position).end()
            failed: Exception | None = None
            if position < len(buffer):
                found = buffer[position]
                if wanted == "end":
                    yield number + 1, broken("text after the end of the array"), 0
                    return
                if wanted == "[" or wanted == "," and found == ",":
                    position, wanted = position + 1, "value or end" if wanted == "[" else "value"
                    continue
                if found == "]" and wanted in (",", "value or end"):
                    position, wanted = position + 1, "end"
                    continue
                if wanted == ",":
                    yield number + 1, broken("a comma or the end of the array is missing"), 0
                    return
                try:
                    value, end = parse(buffer, position)
                    if end < len(buffer) or ended:
                        if "\\ud" in buffer[position:end].lower():
                            json.dumps(value, ensure_ascii=False).encode("utf-8")
                        number += 1
                        yield number, value, end - position
                        position, wanted = end, ","
                        continue
                except json.JSONDecodeError as error:
                    failed = error
                    # an error at the end may only mean that the rest has not been read yet
                    if error.pos < len(buffer) - 16 and not error.msg.startswith("Unterminated string"):
                        ended = True
                except (ValueError, RecursionError) as error:  # two equal keys, half a surrogate pair
                    yield number + 1, broken(error), 0
                    _, position = json.JSONDecoder().raw_decode(buffer, position)
                    number, wanted = number + 1, ","
                    continue
            if ended:
                if wanted != "end":
                    yield number + 1, broken(failed or "the file ends inside the array"), 0
                return
            lines += buffer.count("\n", 0, position)
            data = file.read(chunk)
            ended = not data
            try:
                text = decode(data, ended)
            except UnicodeDecodeError as error:
                yield number + 1, broken(error), 0
                return
            buffer = buffer[position:] + (text.removeprefix("\ufeff") if before else text)
            before = False
            chunk = max(1 << 16, len(buffer))  # a long element is not parsed again and again
            position = 0


@dataclass(frozen=True)
class ParquetFile:
    """Rows of a Parquet file; needs pyarrow."""

    path: Path

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def size(self) -> int:
        return self._open().metadata.num_rows

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def label(self) -> str:
        return _label(self.name)

    def identity(self) -> list[Any]:
        return [self.name, content_hash(self.path)]

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for batch in self._open().iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, without_nulls(row), 1

    def _open(self) -> Any:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                f'{self.path} needs pyarrow, which is not installed: pip install "mlxlab[parquet]".'
            ) from error
        try:
            return pyarrow.parquet.ParquetFile(self.path)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(f"{self.path} cannot be read as Parquet ({reason}).") from error


@dataclass(frozen=True)
class HubRows:
    """A split of a data set of the hub, as `datasets` keeps it on disk."""

    rows: Any
    name: str

    @property
    def bytes(self) -> int:
        return sum(Path(file["filename"]).stat().st_size for file in self.rows.cache_files)

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def label(self) -> str:
        return _label(self.name)

    def identity(self) -> list[Any]:
        # those files are named after their content and never written again
        files = [Path(file["filename"]) for file in self.rows.cache_files]
        facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return [self.name, len(self.rows), facts]

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.rows, 1):
            yield number, without_nulls(row), 1


def without_nulls(value: Any) -> Any:
    """Arrow gives all objects of a column the same keys, with null where a row has none; those are taken away."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON allows a key twice, and Python would silently keep the last value."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return result


def _label(name: str) -> str:
    return f"{_escaped(name)}, row {{}}"


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")

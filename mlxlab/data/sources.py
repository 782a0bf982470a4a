"""Where rows are: a built-in set, a file, a folder with a file per split, or a data set of the hub."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

from mlxlab.data.readers import HubRows, JsonFile, ParquetFile, Reader
from mlxlab.errors import ConfigError, DataError, nearest

BUILT_IN = "mlxlab://"
SETS = Path(__file__).parent / "sets"
READERS = {".jsonl": JsonFile, ".ndjson": JsonFile, ".json": JsonFile, ".parquet": ParquetFile}
VALID = ("valid", "validation", "val", "dev")


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of rows.

    Args:
        path: as data.path.
        weight: how often each row comes per epoch: 1 once, 3 three times, 0.25 a random quarter of them (by seed).
            Validation rows come once.
        split: of training rows: the name of a file in a folder, or a split of a data set of the hub.
        valid_split: of validation rows; null: valid, validation, val or dev, if there is one.
        name: which configuration of a data set of the hub.
    """

    path: str
    weight: float = 1.0
    split: str = "train"
    valid_split: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be > 0 and finite, got {self.weight}")
        if not self.path:
            raise ValueError("path must not be empty")


@dataclass(frozen=True)
class Found:
    """The files of a source."""

    where: str
    train: list[Reader]
    valid: list[Reader]


def find(source: SourceConfig, records: str) -> Found:
    """The files of a source. If a folder has a sub-folder named after the kind of rows, that one is used.

    Raises:
        DataError: there is nothing, or it is not clear which file is meant.
        ConfigError: a package is missing, or an option has no effect.
    """
    path = Path(source.path).expanduser()
    if source.path.startswith(BUILT_IN):
        name = source.path.removeprefix(BUILT_IN)
        names = [folder.name for folder in SETS.iterdir() if folder.is_dir()]
        if name not in names:
            raise DataError(f"data.path={source.path} is not a built-in set; {nearest(name, names)}.")
        path = SETS / name
    elif not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source.path) and source.path[0] != ".":
        return _hub(source)
    if source.name is not None:
        raise ConfigError(f"data: name={source.name} is for data sets of the hub, and {path} is local; leave it out.")
    if path.is_file():
        if source.split != "train" or source.valid_split:
            raise ConfigError(f"data: {path} is a file, so split and valid_split would have no effect; leave them out.")
        return Found(str(path), [_reader(path)], [])
    if not path.is_dir():
        raise DataError(f"data.path={source.path} is neither a folder nor a file (looked at {path.absolute()}).")
    if (path / records).is_dir():
        path = path / records
    train = _files(path, [source.split])
    if not train:
        found = ", ".join(sorted(f.name for f in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{path} has no {source.split}.jsonl (nor {source.split}.json or {source.split}.parquet; found: {found})."
        )
    valid = _files(path, [source.valid_split] if source.valid_split else VALID)
    if source.valid_split and not valid:
        raise DataError(f"{path} has no file of the split {source.valid_split}.")
    return Found(str(path), train, valid)


def _files(folder: Path, splits: Iterable[str]) -> list[Reader]:
    """train.jsonl, or train-00000-of-00002.parquet and so on; also in a folder data/, as on the hub."""
    pattern = re.compile(rf"({'|'.join(map(re.escape, splits))})(-\d+(-of-\d+)?(-[0-9a-f]+)?)?")
    files = [f for f in folder.iterdir() if f.suffix in READERS and f.is_file() and pattern.fullmatch(f.stem)]
    if not files and (folder / "data").is_dir():
        return _files(folder / "data", splits)
    kinds = {(pattern.fullmatch(f.stem)[1], bool(pattern.fullmatch(f.stem)[2]), f.suffix) for f in files}
    if len(kinds) > 1:
        names = ", ".join(sorted(f.name for f in files)[:8])
        raise DataError(f"{folder} has several files for one split ({names}); give the file itself as data.path.")
    return [_reader(file) for file in sorted(files)]


def _reader(path: Path) -> Reader:
    if path.suffix not in READERS:
        raise DataError(f"{path} has an unknown ending {path.suffix!r}; {nearest(path.suffix, READERS)}.")
    return READERS[path.suffix](path)


def _hub(source: SourceConfig) -> Found:
    where = f"data.path={source.path} is neither a folder nor a file here"
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f'{where}; to fetch it from the hub, install datasets: pip install "mlxlab[datasets]".'
        ) from error
    try:
        splits: dict[str, Any] = datasets.load_dataset(source.path, source.name)
    except Exception as error:  # of the network, the hub, the files or the data set's own code: all sorts of types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{where}, and cannot be fetched from the hub now ({reason}); check the spelling and the connection, or "
            "give a local folder."
        ) from error
    valid = [source.valid_split] if source.valid_split else [name for name in VALID if name in splits][:1]
    for name in (source.split, *valid):
        if name not in splits:
            raise DataError(f"data.path={source.path} has no split {name}; {nearest(name, splits)}.")
    readers = {name: HubRows(splits[name], f"{source.path} {name}") for name in (source.split, *valid)}
    return Found(source.path, [readers[source.split]], [readers[name] for name in valid])

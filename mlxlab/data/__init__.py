"""From files to examples: read, recognise, encode, cut, batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlab.data.batches import Batches
from mlxlab.data.encode import Encoder, TooLong, truncate
from mlxlab.data.records import read_rows, to_record
from mlxlab.errors import DataError, nearest
from mlxlab.interfaces import Example

__all__ = ["Batches", "DataConfig", "Dataset", "load_examples"]

BUILT_IN = "mlxlab://"
SETS = Path(__file__).parent / "sets"
TRUNCATIONS, TEMPLATES = ("keep_end", "drop"), ("auto", "chat", "raw")
_SHOWN = 5  # bad rows in one message


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from and how they become tokens.

    Args:
        path: a folder with train.jsonl (and, for validation, valid.jsonl), a .jsonl file, or a built-in set
            ("mlxlab://everyday"). If a folder has a sub-folder named after the kind of rows that the method needs
            (preference or completion), that one is used. Relative to where the program is started.
        max_tokens: longest sequence, >= 2.
        truncation: for longer rows: "keep_end" takes tokens from the beginning of the prompt (never from a response,
            and the same ones in both branches), "drop" leaves the row out. Both are reported.
        template: "auto" renders string prompts through the chat template where there is one, "chat" insists on it,
            "raw" takes them as plain text.
    """

    path: str
    max_tokens: int = 2048
    truncation: str = "keep_end"
    template: str = "auto"

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be >= 2, got {self.max_tokens}")
        for name, allowed in (("truncation", TRUNCATIONS), ("template", TEMPLATES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} does not exist; {nearest(value, allowed)}")


@dataclass(frozen=True)
class Dataset:
    """Encoded rows, and sentences about what happened to others."""

    train: list[Example]
    valid: list[Example]
    report: list[str]


def load_examples(config: DataConfig, tokenizer: Any, records: str) -> Dataset:
    """Read, check and encode all rows.

    Args:
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
        records: "completion" or "preference".

    Raises:
        DataError: files or rows that cannot be used (all of them are looked at first), or no row is left.
    """
    encoder = Encoder.of(tokenizer, config.template, config.max_tokens)
    report: list[str] = []
    train_file, valid_file = _files(config.path, records)
    train = _load(train_file, config, encoder, records, report)
    valid = _load(valid_file, config, encoder, records, report) if valid_file else []
    if not valid_file:
        report.append("no validation rows: no valid.jsonl beside the training rows")
    return Dataset(train, valid, report)


def _files(path: str, records: str) -> tuple[Path, Path | None]:
    if path.startswith(BUILT_IN):
        name = path.removeprefix(BUILT_IN)
        names = [folder.name for folder in SETS.iterdir() if folder.is_dir()]
        if name not in names:
            raise DataError(f"data.path={path} is not a built-in set; {nearest(name, names)}.")
        folder = SETS / name
    else:
        folder = Path(path).expanduser()
    if folder.is_file():
        return folder, None
    if not folder.is_dir():
        raise DataError(f"data.path={path} is neither a folder nor a file (looked at {folder.absolute()}).")
    if (folder / records).is_dir():
        folder = folder / records
    train, valid = folder / "train.jsonl", folder / "valid.jsonl"
    if not train.is_file():
        found = ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
        raise DataError(f"{folder} has no train.jsonl (found: {found}).")
    return train, valid if valid.is_file() else None


def _load(path: Path, config: DataConfig, encoder: Encoder, records: str, report: list[str]) -> list[Example]:
    examples, problems, cut, left_out = [], [], [], []
    for source, row in read_rows(path):
        try:
            record = to_record(row, records, source)
            example = encoder(record)
        except DataError as error:
            problems.append(str(error))
            continue
        except TooLong:
            left_out.append(source)
            continue
        fitting = truncate(example, config.max_tokens, encoder.tokenizer.bos_token_id, record.prompt is None)
        if fitting is not example and (fitting is None or config.truncation == "drop"):
            left_out.append(source)
            continue
        if fitting is not example:
            cut.append(source)
        examples.append(fitting)
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more rows" if len(problems) > _SHOWN else ""
        raise DataError("\n".join(problems[:_SHOWN]) + more)
    for rows, what in (
        (cut, f"cut to data.max_tokens={config.max_tokens}"),
        (left_out, f"left out: too long for data.max_tokens={config.max_tokens}"),
    ):
        if rows:
            named = ", ".join(rows[:_SHOWN]) + (", ..." if len(rows) > _SHOWN else "")
            report.append(f"{len(rows)} of {len(examples) + len(left_out)} rows {what} ({named})")
    if not examples:
        reason = f"; {report[-1]}" if left_out else ""
        raise DataError(f"{path} has no usable row{reason}.")
    return examples

"""From files to examples: read, recognise, encode, cut, batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Sequence

import numpy as np

from mlxlab.data.batches import Batches
from mlxlab.data.encode import SUPERVISE, Encoder
from mlxlab.data.facts import SHOWN, Facts
from mlxlab.data.sources import BUILT_IN, SETS, SourceConfig, find
from mlxlab.data.store import Examples, Store
from mlxlab.data.tokenization import tokenize
from mlxlab.data.truncate import POLICIES
from mlxlab.errors import DataError, nearest

__all__ = ["BUILT_IN", "SETS", "Batches", "DataConfig", "Dataset", "Part", "SourceConfig", "load_examples", "read"]

TEMPLATES, BAD_ROWS = ("auto", "chat", "raw"), ("error", "skip")


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from and how they become tokens.

    Args:
        path: a folder with a file train (and, for validation, valid or validation) ending in .jsonl, .json or
            .parquet; such a file; a data set of the hub (owner/name); or a built-in set ("mlxlab://everyday"). If a
            folder has a sub-folder named after the kind of rows that the method needs (preference or completion), that
            one is used. Relative to where the program is started.
        sources: several of them, each with `path`, `weight` and other options; instead of `path`.
        max_tokens: longest sequence, >= 2.
        truncate: for longer rows: "keep_end" takes tokens from the beginning of the prompt (the same ones in both
            branches), "keep_start" from the end of the response, "drop" leaves the row out, "error" refuses it. Rows
            of which no target would be left are left out. All are counted.
        template: "auto" renders string prompts through the chat template where there is one, "chat" insists on it,
            "raw" takes them as plain text.
        supervise: what is learned of a conversation: "last" (its last turn), "all" (every assistant turn), "template"
            (what the chat template marks with {% generation %}).
        bad_rows: rows that cannot be used: "error" (the run does not start) or "skip" (they are left out and counted).
        cache: keep the tokens of files from 4 MB on disk, memory-mapped; otherwise they are in memory.
    """

    path: str | None
    sources: tuple[SourceConfig, ...] = ()
    max_tokens: int = 2048
    truncate: str = "keep_end"
    template: str = "auto"
    supervise: str = "last"
    bad_rows: str = "error"
    cache: bool = True

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.sources):
            given = f"path={self.path} and {len(self.sources)} sources" if self.sources else "neither"
            raise ValueError(f"one of path and sources must be given, got {given}; data=mix takes sources")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be >= 2, got {self.max_tokens}")
        for name, allowed in (
            ("truncate", POLICIES),
            ("template", TEMPLATES),
            ("supervise", SUPERVISE),
            ("bad_rows", BAD_ROWS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} does not exist; {nearest(value, allowed)}")
        if self.template == "raw" and self.supervise == "template":
            raise ValueError("supervise='template' needs a chat template, and template='raw' uses none")


@dataclass(frozen=True)
class Part:
    """One split of one source: its tokens, and in `store.facts` what happened to its rows."""

    split: str  # "train" or "valid"
    where: str
    weight: float
    store: Store

    @property
    def facts(self) -> Facts:
        return self.store.facts


@dataclass(frozen=True)
class Dataset:
    """Encoded rows, sentences about what happened to others, and where all of them came from."""

    train: Examples
    valid: Examples
    report: list[str]
    parts: list[Part] = field(default_factory=list)


def load_examples(config: DataConfig, tokenizer: Any, records: str, seed: int = 0) -> Dataset:
    """Read, check and encode all rows.

    Args:
        tokenizer: a fast tokenizer of transformers, or mlx-lm's wrapper of one.
        records: "completion" or "preference".
        seed: of the rows that a fractional weight chooses.

    Raises:
        DataError: files or rows that cannot be used (all of them are looked at first), or no row is left.
    """
    dataset = read(config, tokenizer, records, seed)
    if config.bad_rows == "error":
        messages = [message for part in dataset.parts for message in part.facts.messages]
        refused = sum(part.facts.refused.count for part in dataset.parts)
        if refused:
            more = f"\n... and {refused - SHOWN} more rows" if refused > SHOWN else ""
            raise DataError("\n".join(messages[:SHOWN]) + more)
    for part in dataset.parts:
        if not len(part.store):
            reasons = part.facts.sentences(config.max_tokens)
            raise DataError(f"{part.where} has no usable row" + "".join(f"; {reason}" for reason in reasons) + ".")
    return dataset


def read(config: DataConfig, tokenizer: Any, records: str, seed: int = 0) -> Dataset:
    """Like `load_examples`, but rows that cannot be used are only reported."""
    encoder = Encoder.of(tokenizer, config.template, config.max_tokens, config.supervise, config.truncate, records)
    sources = config.sources or (SourceConfig(config.path),)
    parts, report = [], []
    for source in sources:
        found = find(source, records)
        for split, readers in (("train", found.train), ("valid", found.valid)):
            if readers:
                store = tokenize(readers, encoder, records, config.max_tokens, config.truncate, config.cache)
                parts.append(Part(split, found.where, source.weight if split == "train" else 1.0, store))
                prefix = f"{found.where}: " if len(sources) > 1 else ""
                report += [prefix + sentence for sentence in store.facts.sentences(config.max_tokens)]
    train, valid = ([part for part in parts if part.split == split] for split in ("train", "valid"))
    if not valid:
        report.append("no validation rows: no valid.jsonl beside the training rows")
    named = lambda some: [(f"{part.where}/" if len(sources) > 1 else "", part.store) for part in some]
    examples = Examples(named(train), _mix(train, seed, report))
    return Dataset(examples, Examples(named(valid)), report, parts)


def _mix(parts: Sequence[Part], seed: int, report: list[str]) -> np.ndarray | None:
    """Positions of the training rows in the concatenated stores, each as often as its weight says."""
    if all(part.weight == 1 for part in parts):
        return None
    chosen, start = [], 0
    for number, part in enumerate(parts):
        rows, whole = len(part.store), int(part.weight)
        rng = np.random.default_rng([seed, number])
        some = np.sort(rng.permutation(rows)[: round((part.weight - whole) * rows)])
        chosen.append(start + np.concatenate([np.tile(np.arange(rows), whole), some]))
        start += rows
    total = sum(map(len, chosen))
    for part, index in zip(parts, chosen):
        share = f"{100 * len(index) / max(total, 1):.1f} % of the training rows"
        report.append(f"{part.where}: weight {part.weight:g} makes {len(index)} of {len(part.store)} rows, {share}")
        if not len(index) and len(part.store):
            raise DataError(f"{part.where}: weight {part.weight:g} of {len(part.store)} rows is no row; raise it.")
    return np.concatenate(chosen)

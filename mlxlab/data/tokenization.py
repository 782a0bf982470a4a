"""From the files of a split to a store of tokens: kept in a cache, or in memory where that is small.

The cache (`tokens/` in MLXLAB_CACHE) is keyed by everything that the tokens depend on: content of the files,
tokenizer, chat template, options, versions, and this code. So nothing in it is ever out of date, and it may be deleted
at any time.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import contextmanager
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mlxlab.data.encode import Encoder, Prepared, TooLong
from mlxlab.data.facts import Facts
from mlxlab.data.readers import Reader
from mlxlab.data.records import to_record
from mlxlab.data.store import Builder, Store, intact
from mlxlab.data.truncate import truncate
from mlxlab.errors import DataError
from mlxlab.models.cache import build_once, cache_folder

CACHED_FROM = 4_000_000  # bytes of the files of a split; smaller ones are encoded at every start
_CHUNK_ROWS, _CHUNK_CHARACTERS = 512, 400_000  # that are encoded at once, by all cores
_VERSIONS = ("transformers", "tokenizers", "jinja2", "mlx-lm", "numpy")


def tokenize(
    readers: Sequence[Reader], encoder: Encoder, records: str, max_tokens: int, policy: str, cached: bool = True
) -> Store:
    """The examples of a split, and what happened to rows on the way; no row raises.

    Args:
        records: kind of the rows, see `to_record`.
        policy: for rows longer than `max_tokens`, see `truncate`.
        cached: False: never on disk.

    Raises:
        DataError: a file cannot be read at all, changes meanwhile, or the cache cannot be written.
    """
    labels = [reader.label for reader in readers]
    fill = lambda builder, advance: _fill(builder, readers, encoder, records, max_tokens, policy, advance)
    if not cached or sum(reader.bytes for reader in readers) < CACHED_FROM:
        builder = Builder(labels)
        return builder.finish(fill(builder, lambda amount: None))
    before = [reader.identity() for reader in readers]
    settings = [records, max_tokens, policy, encoder.chat, encoder.supervise]
    key = _hash([before, _identity(encoder), settings, [metadata.version(name) for name in _VERSIONS], _code()])

    def build(folder: Path) -> None:
        builder = Builder(labels, folder)
        try:
            with _progress(readers) as advance:
                facts = fill(builder, advance)
        finally:
            builder.close()
        if [reader.identity() for reader in readers] != before:
            raise DataError(f"{_names(readers)} changed while it was read; start again.")
        builder.finish(facts)

    try:
        return Store.open(build_once(key, build, intact, "tokens"))
    except OSError as error:
        raise DataError(
            f"the token cache {cache_folder() / 'tokens'} cannot be used ({error}); make room there, set MLXLAB_CACHE "
            "to another folder, or give data.cache=false."
        ) from error


def _fill(
    builder: Builder,
    readers: Sequence[Reader],
    encoder: Encoder,
    records: str,
    max_tokens: int,
    policy: str,
    advance: Callable[[int], None],
) -> Facts:
    facts, bos = Facts(), encoder.tokenizer.bos_token_id
    chunk: list[tuple[int, int, str, list[Prepared] | Exception]] = []

    def flush() -> None:
        rows = [prepared for *_, prepared in chunk if not isinstance(prepared, Exception)]
        texts = [text for row in rows for prepared in row for text in prepared.texts()]
        encoded = encoder.encode(texts) if texts else {}
        for file, number, place, prepared in chunk:
            if isinstance(prepared, DataError):
                facts.refuse(place, str(prepared))
                continue
            if isinstance(prepared, TooLong):
                _too_long(place)
                continue
            if len(prepared) > 1:
                facts.split.add(place)
            for part in prepared:
                try:
                    example = encoder.finish(part, encoded)
                except DataError as error:
                    facts.refuse(place, str(error))
                    break
                fitting = truncate(example, max_tokens, policy, bos)
                if fitting is None:
                    _too_long(place)
                    continue
                if fitting is not example:
                    facts.cut.add(place)
                    learned = lambda e: sum(sequence.supervised for sequence in e.branches.values())
                    if learned(fitting) < learned(example):
                        facts.cut_learned.add(place)
                builder.add(fitting, file, number, part.answer)
        chunk.clear()

    def _too_long(place: str) -> None:
        if policy == "error":
            message = f"longer than data.max_tokens={max_tokens}; raise it, or choose another data.truncate"
            facts.refuse(place, f"{place}: {message}.")
        else:
            facts.left_out.add(place)

    for file, reader in enumerate(readers):
        label, characters, done = reader.label, 0, 0
        for number, value, amount in reader:
            place = label.format(number)
            facts.rows += 1
            try:
                record = to_record(value, records, place)
                facts.found(record.format, record.unused)
                prepared = encoder.prepare(record)
                characters += sum(len(text) for part in prepared for text in part.texts())
            except (DataError, TooLong) as error:
                prepared = error
            chunk.append((file, number, place, prepared))
            done += amount
            if len(chunk) >= _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                flush()
                advance(done)
                characters = done = 0
        flush()
        advance(done)
    return facts


# ----------------------------------------------------------------------------------------------------------- identity
def _identity(encoder: Encoder) -> list[Any]:
    """Of tokenizer and template, by content."""
    tokenizer, template = encoder.tokenizer, encoder.tokenizer.chat_template
    thinking = encoder.template.tokenizer is not tokenizer and encoder.template.tokenizer.has_thinking
    today = str(date.today()) if "strftime_now" in str(template) else ""  # such a template writes the date
    state = tokenizer.backend_tokenizer.to_str()
    special = [tokenizer.special_tokens_map, tokenizer.split_special_tokens, sorted(encoder.special), encoder.bos]
    return [hashlib.sha256(state.encode()).hexdigest(), template, thinking, today, special]


@cache
def _code() -> str:
    """Of the modules that make tokens, so that a change of them makes caches again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


# ----------------------------------------------------------------------------------------------------------- progress
@contextmanager
def _progress(readers: Sequence[Reader]) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one line elsewhere; on standard error, which nobody parses."""
    name, console = _names(readers), Console(file=sys.stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.print(f"tokenizing {name} (once; kept in {cache_folder() / 'tokens'})", markup=False)
        yield lambda amount: None
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(f"tokenizing {name}", total=sum(reader.size for reader in readers))
        yield lambda amount: progress.advance(task, amount)


def _names(readers: Sequence[Reader]) -> str:
    return readers[0].name + (f" and {len(readers) - 1} more" if len(readers) > 1 else "")

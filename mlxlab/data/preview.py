"""`python -m mlxlab data`: what a run would learn from its rows, before it is started.

    python -m mlxlab data data=jsonl data.path=my_data method=dpo model=smollm2 rows=5 output=data.html

Options: `rows` (rows to show, spread over the split; default 3), `split` (train or valid), `output` (an HTML file with
the same). Everything else is an override of the training configuration. Only the tokenizer of the model is loaded.

Shows formats, rows that would be cut, left out or refused and why, lengths, and rows as the model sees them: learned
tokens are coloured, or stand in [[ ]] where there are no colours. The exit code is 1 if a run would refuse the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from mlxlab.data import DataConfig, Dataset, Part, read
from mlxlab.data.encode import Encoder
from mlxlab.errors import ConfigError, DataError, nearest
from mlxlab.interfaces import TokenSequence

OPTIONS = {"rows": "3", "split": "train", "output": ""}
_BINS, _BAR, _LONGEST = 12, 40, 4000  # of a histogram; characters of a bar; characters of a text that are shown

Run = tuple[str, bool]  # text, whether it is learned


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers in [first, last], bin by bin."""

    title: str
    bins: list[tuple[int, int, int]]  # first, last, count


@dataclass(frozen=True)
class Shown:
    """One row: its place, and per branch a line of numbers and its text in runs."""

    source: str
    branches: list[tuple[str, list[Run]]]


@dataclass(frozen=True)
class Preview:
    """Everything that is shown, ready for the console or for HTML."""

    facts: list[tuple[str, str]]  # name, value
    refused: list[str]
    histograms: list[Histogram]
    rows: list[Shown]
    usable: bool


def main(arguments: Sequence[str]) -> int:
    """Print the preview, write it as HTML if asked to; returns the exit code."""
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    options, overrides = _split(arguments)
    from mlxlab.cli import compose_run
    from mlxlab.models.load import load_tokenizer

    config, _ = compose_run(overrides)
    folder = config.source.tokenizer_folder()
    tokenizer = load_tokenizer(folder)
    dataset = read(config.data, tokenizer, config.method.records, config.seed)
    preview = preview_of(config.data, dataset, tokenizer, str(folder), options["split"], int(options["rows"]))
    print_preview(preview)
    if options["output"]:
        from mlxlab.data.html import write_html

        path = write_html(preview, Path(options["output"]).expanduser())
        print(f"written to {path}")
    return 0 if preview.usable else 1


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options, overrides = dict(OPTIONS), []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator and not argument.startswith("~"):
            raise ConfigError(f"data: {argument!r} is not of the form key=value; options: {', '.join(OPTIONS)}.")
        if key in OPTIONS:
            options[key] = value
        else:
            overrides.append(argument)
    if not options["rows"].isdigit():
        raise ConfigError(f"data: rows must be an integer >= 0, got {options['rows']!r}.")
    if options["split"] not in ("train", "valid"):
        raise ConfigError(
            f"data: split={options['split']} does not exist; {nearest(options['split'], ('train', 'valid'))}."
        )
    if options["output"] and Path(options["output"]).suffix not in (".html", ".htm"):
        raise ConfigError(f"data: output={options['output']} must be a file ending in .html.")
    return options, overrides


def preview_of(config: DataConfig, dataset: Dataset, tokenizer: Any, model: str, split: str, rows: int) -> Preview:
    """What there is to say about a data set, with `rows` rows of a split."""
    examples = dataset.train if split == "train" else dataset.valid
    if split == "valid" and not len(examples):
        raise DataError("data: there are no validation rows to show; give split=train.")
    facts = [("tokenizer", model), *((part.split, _summary(part, config)) for part in dataset.parts)]
    facts += [("", sentence) for sentence in dataset.report]
    refused = []
    for part in dataset.parts:
        for reason, count in sorted(part.facts.reasons.items(), key=lambda item: -item[1]):
            refused.append(f"{count} x {reason}")
        refused += part.facts.messages[:5]
    lengths = examples.lengths
    learned = np.array([sum(s.supervised for s in example.branches.values()) for example in examples])
    histograms = [
        _histogram(f"tokens per row (longest branch), {split}", lengths),
        _histogram(f"learned tokens per row, {split}", learned),
    ]
    numbers = sorted({int(n) for n in np.linspace(0, len(examples) - 1, rows)}) if len(examples) and rows else []
    plain = Encoder.of(tokenizer, "auto").tokenizer
    shown = [
        Shown(e.source, [(_numbers(branch, s), _runs(s, plain)) for branch, s in e.branches.items()])
        for e in (examples[number] for number in numbers)
    ]
    good = config.bad_rows == "skip" or not any(part.facts.refused.count for part in dataset.parts)
    return Preview(facts, refused, histograms, shown, good and all(len(part.store) for part in dataset.parts))


def _summary(part: Part, config: DataConfig) -> str:
    facts = part.facts
    mix = ", ".join(f"{count} {name}" for name, count in facts.formats.items()) or "none"
    return (
        f"{part.where}: {facts.rows} rows, {len(part.store)} examples; {facts.cut.count} cut, "
        f"{facts.left_out.count} left out, {facts.refused.count} refused; formats: {mix}"
    )


def _histogram(title: str, values: np.ndarray) -> Histogram:
    if not len(values):
        return Histogram(f"{title}: none", [])
    low, middle, high, top = (int(np.percentile(values, p, method="lower")) for p in (0, 50, 95, 100))
    title = f"{title}: shortest {low}, median {middle}, 95th percentile {high}, longest {top}, sum {int(values.sum())}"
    width = max(1, -(-(top - low + 1) // _BINS))
    counts = np.bincount((values - low) // width)
    return Histogram(title, [(low + i * width, low + (i + 1) * width - 1, int(c)) for i, c in enumerate(counts)])


def _numbers(branch: str, sequence: TokenSequence) -> str:
    return f"{branch}: {len(sequence)} tokens, {sequence.supervised} learned"


def _runs(sequence: TokenSequence, tokenizer: Any) -> list[Run]:
    """Text of neighbours that are all learned or all not; decoded in its context."""
    decode = lambda count: tokenizer.decode(sequence.ids[:count].tolist(), clean_up_tokenization_spaces=False)
    ends = [*(np.flatnonzero(np.diff(sequence.response)) + 1), len(sequence)]
    runs, done = [], ""
    for end in map(int, ends):
        text = decode(end)
        runs.append((_shortened(text[len(done) :]), bool(sequence.response[end - 1])))
        done = text
    return runs


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... {len(text) - _LONGEST} more characters ... {text[-half:]}"


def print_preview(preview: Preview) -> None:
    """On standard output."""
    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    for name, value in preview.facts:
        console.print(f"{name:<10} {value}", markup=False)
    if preview.refused:
        console.print("\nrefused rows", style="bold red")
        for line in preview.refused:
            console.print(f"  {line}", markup=False)
    for histogram in preview.histograms:
        console.print(f"\n{histogram.title}", style="bold", markup=False)
        highest = max((count for *_, count in histogram.bins), default=1)
        width = len(str(histogram.bins[-1][1])) if histogram.bins else 1
        for first, last, count in histogram.bins:
            bar = "#" * -(-_BAR * count // highest)
            console.print(f"  {first:>{width}} to {last:>{width}}  {bar:<{_BAR}} {count}", markup=False)
    for row in preview.rows:
        for numbers, runs in row.branches:
            console.print(f"\n{row.source}  {numbers}", style="bold", markup=False)
            text = Text()
            for part, learned in runs:
                visible = part.replace("\r", "␍").replace("\n", "↵\n")
                marked = f"[[{visible}]]" if learned and not coloured else visible
                text.append(marked, style="bold green" if learned else "dim")
            console.print(text)

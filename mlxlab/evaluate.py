"""`python -m mlxlab evaluate RUN`: what a trained adapter does on a split, beside the base model without it.

    python -m mlxlab evaluate latest
    python -m mlxlab evaluate outputs/2026-12-01/14-03-22-417733 split=test adapter=checkpoints/step-00020 head=naive

RUN is a run folder, or `latest` (the latest one in output_dir that has an adapter). Options:

    split       train, valid (default), test (test.jsonl beside the run's training rows), or a .jsonl file
    adapter     best (default where there is one), adapter, checkpoints/step-..., or another adapter folder
    rows        rows that are used, from the top; 0 (default): all
    samples     prompts whose answers are generated with and without the adapter (default 3)
    output_dir  where `latest` is looked for (default outputs)

Everything else changes the run's own configuration: head=naive, data.path=..., model.dtype=float32, ... Model, data,
head and layout are those of config.yaml, and relative paths in it mean what they meant when the run was started.

Measured row by row: the metrics of the run's method, and the perplexity of the responses (of the first branch, such as
chosen): exp of the mean of -log p over all their tokens. Intervals are 95 %: Wilson for accuracy, percentile bootstrap
over rows for the others. The table is also in RUN/evaluation-SPLIT.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table
from rich.text import Text

from mlxlab import __version__, backend, compat
from mlxlab.config import NODES, RunConfig, build_config
from mlxlab.data import BUILT_IN, SETS, load_examples
from mlxlab.discovery import load_plugins
from mlxlab.engine import StepEngine
from mlxlab.errors import CheckpointError, ConfigError, nearest
from mlxlab.interfaces import Example, Setup
from mlxlab.lora import apply_lora, load_adapter_weights
from mlxlab.measure import INTERVALS, Measured, measure
from mlxlab.metrics import number
from mlxlab.models.load import load, load_tokenizer, read_config
from mlxlab.registry import Registry
from mlxlab.rundir import find_checkpoints, find_runs, write_json
from mlxlab.samples import generate, prompts_of
from mlxlab.table import console

OPTIONS = {"split": "valid", "adapter": "", "rows": "0", "samples": "3", "output_dir": "outputs"}
SPLITS = ("train", "valid", "test")
LATEST = "latest"
_SELECTED = ("method", "head")  # groups whose options may be replaced by another choice: head=naive


def main(arguments: Sequence[str]) -> int:
    """Evaluate as the command line says, print the table, write the file; returns the exit code."""
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    if not arguments or "=" in arguments[0]:
        raise ConfigError("evaluate needs a run folder: mlxlab evaluate RUN [key=value ...], or latest for RUN.")
    options, overrides = _split(arguments[1:])
    run = find_run(arguments[0], options["output_dir"])
    adapter = find_adapter(run, options["adapter"])
    if options["split"] not in SPLITS:
        options["split"] = str(Path(options["split"]).expanduser().absolute())
    overrides = [_absolute(override) for override in overrides]
    with _where_it_was_started(run):
        result = evaluate(run, adapter, overrides, options["split"], int(options["rows"]), int(options["samples"]))
    name = options["split"] if options["split"] in SPLITS else Path(options["split"]).stem
    print_result(result)
    path = run / f"evaluation-{name}.json"
    try:
        write_json(path, result)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}); make the run folder writable.") from error
    print(f"written to {path}")
    return 0


# ------------------------------------------------------------------------------------------------------ what and where
def find_run(where: str, output_dir: str) -> Path:
    """The run folder that RUN means, absolute.

    Raises:
        CheckpointError: it is not the folder of a run.
    """
    if where == LATEST:
        runs = [run for run in find_runs(output_dir) if _adapters(run)]
        if not runs:
            raise CheckpointError(
                f"evaluate latest: no run in {Path(output_dir).absolute()} has an adapter; name a run folder, or "
                "give output_dir=..."
            )
        return runs[-1].absolute()
    run = Path(where).expanduser().absolute()
    if not (run / "config.yaml").is_file():
        inside = next((parent for parent in run.parents if (parent / "config.yaml").is_file()), None)
        remedy = f"did you mean {inside}?" if inside else "give the folder that training printed as run folder."
        raise CheckpointError(f"{run} is not the folder of a run: it has no config.yaml; {remedy}")
    return run


def find_adapter(run: Path, name: str) -> Path:
    """The adapter folder: `name` inside the run or anywhere, or the best one there is."""
    found = _adapters(run)
    if not name and not found:
        raise CheckpointError(f"{run} has no adapter (best/, adapter/ or checkpoints/step-...); take another run.")
    for folder in (run / (name or found[0]), Path(name).expanduser().absolute()):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise CheckpointError(f"adapter={name} is neither in {run} nor an adapter folder; {nearest(name, found)}")


def _adapters(run: Path) -> list[str]:
    """Adapters of a run, the one to take first."""
    steps = [f"checkpoints/{path.name}" for path in reversed(find_checkpoints(run))]
    return [name for name in ("best", "adapter", *steps) if (run / name / "adapter_config.json").is_file()]


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options, overrides = dict(OPTIONS), []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"evaluate: {argument!r} is not of the form key=value; options: {', '.join(OPTIONS)}.")
        if key in OPTIONS:
            options[key] = value
        else:
            overrides.append(argument)
    for key in ("rows", "samples"):
        if not options[key].isdigit():
            raise ConfigError(f"evaluate: {key} must be an integer >= 0, got {options[key]!r}.")
    return options, overrides


def _absolute(override: str) -> str:
    """Paths that are given here are relative to here, not to where the run was started."""
    key, _, value = override.partition("=")
    if key in ("data.path", "model.path") and Path(value).expanduser().exists():
        return f"{key}={Path(value).expanduser().absolute()}"
    return override


@contextmanager
def _where_it_was_started(run: Path) -> Iterator[None]:
    """Relative paths and local plugins of a run are found from its working directory, if that still exists."""
    before = os.getcwd()
    try:
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        os.chdir(facts["working_directory"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        yield
    finally:
        os.chdir(before)


def configure(run: Path, overrides: Sequence[str], registry: Registry) -> RunConfig:
    """The run's configuration with some values changed."""
    try:
        stored = OmegaConf.load(run / "config.yaml")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run / 'config.yaml'} cannot be read ({error}).") from error
    stored = OmegaConf.merge(stored, {"train": {"resume": None}, "lora": {"warm_start": None}})
    for override in overrides:
        key, _, value = override.partition("=")
        if key in NODES and key not in _SELECTED:
            raise ConfigError(
                f"evaluate: {override} selects an option of a group, which is possible for {' and '.join(_SELECTED)} "
                f"only; change single values, such as {key}.KEY=VALUE."
            )
        try:
            values = OmegaConf.from_dotlist([f"{key}.name={value}" if key in _SELECTED else override])
        except OmegaConfBaseException as error:
            raise ConfigError(f"evaluate: {override} cannot be used ({error}).") from error
        if key in _SELECTED:
            stored[key] = values[key]
        else:
            stored = OmegaConf.merge(stored, values)
    return build_config(stored, registry)


# ---------------------------------------------------------------------------------------------------------- evaluation
def load_rows(config: RunConfig, tokenizer: Any, split: str) -> tuple[Sequence[Example], list[str]]:
    """The encoded rows of a split and the sentences of the loader about them."""
    records = config.method.records
    data = config.data
    if split not in ("train", "valid"):
        if split == "test":
            path = data.path
            if path is None:
                raise ConfigError("split=test: the run has several data.sources; give the .jsonl file to evaluate on.")
            folder = SETS / path.removeprefix(BUILT_IN) if path.startswith(BUILT_IN) else Path(path).expanduser()
            folder = folder.parent if folder.is_file() else folder
            file = next((f for f in (folder / records / "test.jsonl", folder / "test.jsonl") if f.is_file()), None)
            if file is None:
                raise ConfigError(
                    f"split=test: {folder} has no test.jsonl; add one, or give split=train, valid or a .jsonl file."
                )
        else:
            file = Path(split)
            if not file.is_file():
                raise ConfigError(
                    f"split={split} is neither a split nor a file (for another folder give data.path=FOLDER); "
                    f"{nearest(file.name, SPLITS)}"
                )
        loaded = load_examples(dataclasses.replace(data, path=str(file), sources=()), tokenizer, records, config.seed)
        return loaded.train, [line for line in loaded.report if "validation" not in line]
    loaded = load_examples(data, tokenizer, records, config.seed)
    rows = loaded.valid if split == "valid" else loaded.train
    if not len(rows):
        raise ConfigError(f"split={split}: data.path={data.path} has no such rows; give split=train or a .jsonl file.")
    return rows, loaded.report


def evaluate(
    run: Path, adapter: Path, overrides: Sequence[str], split: str, limit: int = 0, samples: int = 3
) -> dict[str, Any]:
    """Everything that is measured, as plain values."""
    registry = load_plugins()
    config = configure(run, overrides, registry)
    setup = Setup(
        config.method,
        config.head,
        config.backward,
        config.layout,
        config.lora,
        1,
        backend.device(),
        attention=config.attention,
    )
    compat.check(setup)
    checkpoint = config.source.folder()
    model_config = read_config(checkpoint)
    family = registry.family_for(model_config["model_type"])
    compat.check(setup, family, model_config)
    tokenizer = load_tokenizer(checkpoint)
    rows, report = load_rows(config, tokenizer, split)
    loaded = load(checkpoint, family, config.model.dtype, config.model.linear, tokenizer)
    if 0 < limit < len(rows):
        rows = [rows[i] for i in range(limit)]
    blocks = [block.path for block in loaded.adapter.blocks()]
    lora = apply_lora(loaded.model, blocks, config.lora, config.seed, checkpoint, loaded.adapter.lora_targets)
    load_adapter_weights(lora, adapter, "adapter")
    method = Measured(config.method)
    engine = StepEngine(loaded.adapter, lora, method, config.head, config.backward, config.layout, config.attention)

    print(f"evaluating {len(rows)} rows of {split} with {adapter}", flush=True)
    columns = {"adapter": measure(engine, rows, base=False), "base": measure(engine, rows, base=True)}
    texts = []
    for prompt in prompts_of(rows, config.method.branches[0], samples):
        answer = lambda: generate(loaded.model, loaded.tokenizer, prompt, config.train.sample_tokens)
        text = {"prompt": loaded.tokenizer.decode(prompt), "adapter": answer()}
        with lora.disabled():
            text["base"] = answer()
        texts.append(text)
    return {
        "run": str(run),
        "adapter": str(adapter),
        "split": split,
        "rows": len(rows),
        "data": report,
        "overrides": list(overrides),
        "components": config.components(),
        "metrics": {name: {column: columns[column][name] for column in columns} for name in columns["adapter"]},
        "intervals": INTERVALS,
        "samples": texts,
        "mlxlab": __version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def print_result(result: Mapping[str, Any]) -> None:
    """A row per metric, then the generated texts side by side."""

    def shown(cell: Mapping[str, float | None]) -> str:
        interval = "" if cell["low"] is None else f"  [{number(cell['low'])}, {number(cell['high'])}]"
        return f"{number(cell['value'])}{interval}"

    out = console()
    table = Table("metric", "adapter  [95 %]", "base  [95 %]")
    for name, columns in result["metrics"].items():
        table.add_row(name.replace("_", " "), shown(columns["adapter"]), shown(columns["base"]))
    out.print(table)
    if result["samples"]:
        table = Table("prompt", "adapter", "base", show_lines=True)
        for sample in result["samples"]:
            cells = (sample["prompt"].strip()[-120:], sample["adapter"], sample["base"])
            table.add_row(*[Text(cell, overflow="fold") for cell in cells])
        out.print(table)

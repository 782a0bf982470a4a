"""`python -m mlxlab bench`: time, memory and loss of a training step, over a grid, beside other trainers.

    python -m mlxlab bench model=smollm2 method=orpo memory=none,[segmented,prefix_shared] head=fused,flash \\
        length=256 prompt=128 peers=mlx_lm

Options of the bench: `length` (tokens per sequence, a list makes a grid), `prompt` (tokens that the branches of a row
share, default half), `rows` (rows per step), `repeats` (timed steps per cell; the median counts), `peers`, `output`
(folder for bench.json). Everything else is an override of the training configuration; lists make a grid.

Every cell runs in a process of its own, one after the other, on the same random token rows and the same checkpoint.
A peer gets the branches of those rows as ordinary sequences. So all cells see the same tokens, and a cell that runs
out of memory takes nothing else with it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from mlxlab.errors import ConfigError, nearest

OPTIONS = {"length": "256", "prompt": "", "rows": "1", "repeats": "3", "peers": "", "output": ""}
PEERS = ("mlx_lm", "mlx_lm_checkpoint")
_CELL = "--cell"


def main(arguments: Sequence[str]) -> int:
    """Run the grid and print the table; returns the exit code."""
    if arguments[:1] == [_CELL]:
        print("\n" + json.dumps(run_cell(json.loads(arguments[1]))))
        return 0
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    options, overrides = _split(arguments)
    cells = _cells(options, overrides)
    results = []
    for number, cell in enumerate(cells, 1):
        print(f"[{number}/{len(cells)}] {_label(cell)} length={cell['length']}", file=sys.stderr, flush=True)
        results.append({**cell, **_in_process(cell)})
    _print_table(results)
    if options["output"]:
        folder = Path(options["output"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"written to {folder / 'bench.json'}")
    return 1 if any("error" in result for result in results) else 0


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options, overrides = dict(OPTIONS), []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"bench: {argument!r} is not of the form key=value; options: {', '.join(OPTIONS)}")
        if key in OPTIONS:
            options[key] = value
        else:
            overrides.append(argument)
    for key in ("rows", "repeats", "prompt"):
        if options[key] and not (options[key].isdigit() and int(options[key]) > 0):
            raise ConfigError(f"bench: {key} must be an integer >= 1, got {options[key]!r}")
    for peer in filter(None, options["peers"].split(",")):
        if peer not in PEERS:
            raise ConfigError(f"bench: peers={peer} is not known; {nearest(peer, PEERS)}")
    return options, overrides


def _cells(options: dict[str, str], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Peers first, then the product of all lists."""
    lists = [[f"{key}={value}" for value in _choices(rest)] for key, _, rest in (o.partition("=") for o in overrides)]
    cells = []
    for length in _choices(options["length"]):
        if not length.isdigit() or int(length) < 4:
            raise ConfigError(f"bench: length must be integers >= 4, got {length!r}")
        common = {
            "length": int(length),
            "prompt": int(options["prompt"] or int(length) // 2),
            "rows": int(options["rows"]),
            "repeats": int(options["repeats"]),
        }
        if common["prompt"] > common["length"] - 2:
            raise ConfigError(f"bench: prompt={common['prompt']} must leave 2 of length={length} tokens")
        first = [choices[0] for choices in lists]
        cells += [{"peer": peer, "overrides": first, **common} for peer in filter(None, options["peers"].split(","))]
        cells += [{"peer": None, "overrides": list(job), **common} for job in itertools.product(*lists)]
    return cells


def _choices(text: str) -> list[str]:
    """Split at commas outside of brackets: `none,[segmented,prefix_shared]` has two choices."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _in_process(cell: dict[str, Any]) -> dict[str, Any]:
    environment = dict(os.environ)
    if cell["peer"]:
        environment["MLXLAB_BLAS"] = "off"  # a peer runs as its users run it
    command = [sys.executable, "-m", "mlxlab", "bench", _CELL, json.dumps(cell)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1][:300]}


# ---------------------------------------------------------------------------------------------------------- one cell
def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Measure one cell in this process: seconds and peak per step, tokens per second, loss."""
    import mlx.core as mx

    from mlxlab.cli import compose_run
    from mlxlab.models.load import load, read_config

    config, registry = compose_run(cell["overrides"])
    checkpoint = config.source.folder()
    model_config = read_config(checkpoint)
    examples = _random_rows(cell, config.method.branches, model_config)
    if cell["peer"]:
        step = _peer_step(cell["peer"], checkpoint, config, examples)
    else:
        family = registry.family_for(model_config["model_type"])
        loaded = load(checkpoint, family, config.model.dtype, config.model.linear)
        step = _own_step(loaded, config, examples)

    step()  # compilation, caches
    seconds, loss = [], 0.0
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in range(cell["repeats"]):
        start = time.perf_counter()
        loss = step()
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = sum(len(sequence) for example in examples for sequence in example.branches.values())
    median = statistics.median(seconds)
    return {
        "ms": 1e3 * median,
        "spread_ms": 1e3 * (max(seconds) - min(seconds)),
        "tokens_per_second": tokens / median,
        "peak_gb": mx.get_peak_memory() / 1e9,
        "loss": loss,
    }


def _random_rows(cell: dict[str, Any], branches: Sequence[str], model_config: dict[str, Any]) -> list[Any]:
    import numpy as np

    from mlxlab.interfaces import Example, TokenSequence

    text = model_config.get("text_config") or model_config
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(cell["rows"]):
        prompt = rng.integers(3, text["vocab_size"], cell["prompt"])
        sequences = {}
        for branch in branches:
            ids = np.concatenate([prompt, rng.integers(3, text["vocab_size"], cell["length"] - cell["prompt"])])
            sequences[branch] = TokenSequence(ids.astype(np.int32), np.arange(len(ids)) >= cell["prompt"])
        rows.append(Example(sequences))
    return rows


def _own_step(loaded: Any, config: Any, examples: list[Any]) -> Callable[[], float]:
    from mlxlab.engine import StepEngine
    from mlxlab.interfaces import Totals
    from mlxlab.lora import apply_lora
    from mlxlab.optim import Optimizer

    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], config.lora, config.seed)
    engine = StepEngine(
        loaded.adapter, lora, config.method, config.head, config.backward, config.layout, config.attention
    )
    optimizer = Optimizer(config.optim, 100)
    totals = Totals.of(examples, config.method.spans())
    count = itertools.count(1)

    def step() -> float:
        result = engine.step(examples, totals)
        lora.update(optimizer.update(lora.params(), result.grads, next(count)))
        return result.loss.item()

    return step


def _peer_step(peer: str, checkpoint: Path, config: Any, examples: list[Any]) -> Callable[[], float]:
    """mlx-lm's own training step, compiled as its trainer compiles it, with the LoRA of the configuration."""
    from functools import partial

    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optimizers
    import numpy as np
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(checkpoint)
    model.freeze()
    keys = sorted({f"{parent}.{name}" for parent in ("self_attn", "mlp") for name in config.lora.targets})
    parameters = {"rank": config.lora.rank, "scale": config.lora.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, config.lora.num_layers, parameters)
    model.train()
    if peer == "mlx_lm_checkpoint":
        trainer.grad_checkpoint(model.layers[0])
    sequences = [sequence for example in examples for sequence in example.branches.values()]
    batch = mx.array(np.stack([sequence.ids for sequence in sequences]))
    starts = [[int(sequence.response.argmax()), len(sequence)] for sequence in sequences]
    lengths = mx.array(starts)
    optimizer = optimizers.AdamW(config.optim.learning_rate)
    loss_value_and_grad = nn.value_and_grad(model, trainer.default_loss)
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update():
        (loss, _), grads = loss_value_and_grad(model, batch, lengths)
        optimizer.update(model, grads)
        return loss

    def step() -> float:
        loss = update()
        mx.eval(state, loss)
        return loss.item()

    return step


def _label(cell: dict[str, Any]) -> str:
    return cell["peer"] or " ".join(cell["overrides"])


def _print_table(results: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("cell", "length", "ms/step", "± ms", "tokens/s", "peak GB", "loss")
    for row in results:
        if "error" in row:
            table.add_row(_label(row), str(row["length"]), row["error"], "", "", "", "")
            continue
        numbers = [f"{row['ms']:.0f}", f"{row['spread_ms']:.0f}", f"{row['tokens_per_second']:.0f}"]
        table.add_row(_label(row), str(row["length"]), *numbers, f"{row['peak_gb']:.2f}", f"{row['loss']:.4f}")
    Console(width=None if sys.stdout.isatty() else 200).print(table)

"""One cell of a bench: a training step of one configuration, or of another program, measured in this process."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any, Sequence

import mlx.core as mx
import numpy as np

from mlxlab.bench import peers
from mlxlab.cli import compose_run
from mlxlab.engine import StepEngine
from mlxlab.interfaces import Example, TokenSequence, Totals
from mlxlab.lora import apply_lora
from mlxlab.models.load import load, read_config
from mlxlab.optim import Optimizer


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Time, peak memory and loss.

    Args:
        cell: `peer` (name or None), `overrides`, `length` and `prompt` in tokens, `rows`, `repeats`.

    Returns:
        `first_seconds` of the first step, which builds and compiles; `ms` (median of the `repeats` steps after it) with
        `spread_ms`; `tokens_per_second`; `peak_gb` (1e9 bytes) of those steps, weights included; `loss` of the first.
    """
    config, registry = compose_run(cell["overrides"])
    checkpoint = config.source.folder()
    model_config = read_config(checkpoint)
    examples = random_rows(cell, config.method.branches, model_config)
    steps = 1 + cell["repeats"]
    family = registry.family_for(model_config["model_type"])
    if cell["peer"]:
        method = config.components()["method"]["name"]
        targets = config.lora.targets or family.lora_targets
        reports = peers.run(cell["peer"], method, checkpoint, config, targets, examples, steps)
        seconds, loss = reports.seconds, reports.losses[0]
    else:
        loaded = load(checkpoint, family, config.model.dtype, config.model.linear)
        seconds, loss = _own_steps(loaded, config, examples, steps)
    tokens = sum(len(sequence) for example in examples for sequence in example.branches.values())
    median = statistics.median(seconds[1:])
    return {
        "ms": 1e3 * median,
        "spread_ms": 1e3 * (max(seconds[1:]) - min(seconds[1:])),
        "first_seconds": seconds[0],
        "tokens_per_second": tokens / median,
        "peak_gb": mx.get_peak_memory() / 1e9,
        "loss": loss,
    }


def random_rows(cell: dict[str, Any], branches: Sequence[str], model_config: dict[str, Any]) -> list[Example]:
    """Rows of random tokens, the same for the same sizes; the branches of a row share their prompt."""
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


def _own_steps(loaded: Any, config: Any, examples: list[Example], steps: int) -> tuple[list[float], float]:
    lora = apply_lora(
        loaded.model,
        [block.path for block in loaded.adapter.blocks()],
        config.lora,
        config.seed,
        family_targets=loaded.adapter.lora_targets,
    )
    parts = config.method, config.head, config.backward, config.layout, config.attention
    engine = StepEngine(loaded.adapter, lora, *parts)
    optimizer = Optimizer(config.optim, steps + config.optim.warmup)
    totals = Totals.of(examples, config.method.spans())
    seconds, losses = [], []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        result = engine.step(examples, totals)
        lora.update(optimizer.update(lora.params(), result.grads, number))
        losses.append(result.loss.item())
        del result
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
        if number == 1:
            mx.clear_cache()
            mx.reset_peak_memory()
    return seconds, losses[0]


def machine_limits(dtype: str) -> dict[str, float]:
    """What this machine does at best: matrix products in FLOP/s, and reading plus writing memory in bytes/s.

    Measured on sizes large enough to fill a device and small enough to take well under a second on a CPU.
    """
    from mlxlab import backend
    from mlxlab.models.load import DTYPES

    on_gpu = backend.device() != "cpu"
    size, elements = (8192, 1 << 28) if on_gpu else (1536, 1 << 24)
    x = mx.random.normal((size, size)).astype(DTYPES[dtype])
    y = mx.zeros((elements,), mx.float32)
    mx.eval(x, y)
    product = _fastest(lambda: x @ x)
    copy = _fastest(lambda: y + 1)
    return {"flops": 2 * size**3 / product, "bytes": 2 * y.nbytes / copy}


def _fastest(function: Any, repeats: int = 5) -> float:
    seconds = []
    for _ in itertools.repeat(None, repeats + 1):
        start = time.perf_counter()
        mx.eval(function())
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])

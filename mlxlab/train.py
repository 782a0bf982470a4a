"""The training loop. Read it from top to bottom; everything else in the package is called from here."""

from __future__ import annotations

import math
import time
from itertools import chain
from typing import Any, Sequence

import mlx.core as mx

from mlxlab import adapters, backend, compat
from mlxlab.config import RunConfig
from mlxlab.data import Batches, load_examples
from mlxlab.engine import StepEngine
from mlxlab.errors import NonFiniteError
from mlxlab.interfaces import Example, Params, Setup, Totals
from mlxlab.lora import apply_lora, load_adapter_weights
from mlxlab.metrics import MetricsLog, Reporter, Window
from mlxlab.models.load import load, read_config
from mlxlab.optim import Optimizer, clip_by_global_norm, learning_rate_at
from mlxlab.rundir import RunFolder, write_json
from mlxlab.samples import generate, prompts_of


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Train as configured, write everything to `folder`, and return the summary that is also in metrics.json."""
    mx.random.seed(config.seed)
    mx.clear_cache()
    mx.reset_peak_memory()
    started = time.perf_counter()

    # ---- what was asked for must be possible, before anything large is fetched or loaded
    method, train = config.method, config.train
    setup = Setup(
        method,
        config.head,
        config.backward,
        config.layout,
        config.lora,
        train.batch_size,
        backend.device(),
        attention=config.attention,
    )
    compat.check(setup)
    checkpoint = config.source.folder()
    model_config = read_config(checkpoint)
    family = folder.registry.family_for(model_config["model_type"])
    compat.check(setup, family, model_config)

    # ---- data, model, adapter
    loaded = load(checkpoint, family, config.model.dtype, config.model.linear)
    data = load_examples(config.data, loaded.tokenizer, method.records)
    blocks = [block.path for block in loaded.adapter.blocks()]
    lora = apply_lora(loaded.model, blocks, config.lora, config.seed, checkpoint)
    if config.lora.warm_start:
        load_adapter_weights(lora, config.lora.warm_start)
    engine = StepEngine(loaded.adapter, lora, method, config.head, config.backward, config.layout, config.attention)

    # ---- how long, and what will happen
    batches = Batches(data.train, train.batch_size, config.seed)
    total = train.updates(batches.batches_per_epoch)
    optimizer = Optimizer(config.optim, total)
    valid = data.valid[: train.validate_rows or None]
    prompts = prompts_of(valid or data.train, method.branches[0], train.samples)
    longest = sorted(data.train, key=lambda example: -max(map(len, example.branches.values())))[: train.batch_size]
    plan = {
        "device": backend.describe(),
        "model": f"{checkpoint} ({model_config['model_type']}, {loaded.dtype}, quantized products: {loaded.policy})",
        "components": config.components(),
        "attention": f"{config.attention}; longest rows: {engine.describe_attention(longest)}",
        "adapter": lora.summary(),
        "ranks": lora.ranks,
        "data": [f"{len(data.train)} training rows, {len(valid)} validation rows", *data.report],
        "updates": total,
        "peak_learning_rate": config.optim.learning_rate,
    }
    folder.start(plan)
    log = MetricsLog(folder.path, folder.observe)
    log.write("meta", method=config.components()["method"]["name"], model=str(checkpoint), updates=total, plan=plan)
    window, trajectory = Window(), []
    best: dict[str, float] = {}

    def validate(step: int) -> None:
        """Loss and metrics of the validation rows; the best adapter so far is kept in best/."""
        totals = Totals.of(valid, method.spans())
        values = [engine.evaluate(rows, totals) for rows in Batches(valid, train.batch_size, 0, shuffle=False).epoch()]
        record = {"loss": sum(loss.item() for loss, _ in values), **_sum_metrics([m for _, m in values])}
        if not math.isfinite(record["loss"]):
            raise NonFiniteError(
                f"the validation loss after update {step} is {record['loss']}; the last good adapter is unchanged. "
                "Lower optim.learning_rate, or check the data and the base weights."
            )
        log.write("val", step=step, **record)
        reporter.values("val", step, total, record)
        trajectory.append({"step": step, **record})
        if "margin" in record:
            best["margin"] = max(best.get("margin", -math.inf), record["margin"])
        if record["loss"] < best.get("loss", math.inf):
            best.update(loss=record["loss"], step=step)
            if step:
                folder.save("best", lambda path: save(path))
                log.write("event", step=step, event="best", loss=record["loss"])

    def sample(step: int) -> None:
        for prompt in prompts:
            text = generate(loaded.model, loaded.tokenizer, prompt, train.sample_tokens)
            asked = loaded.tokenizer.decode(prompt)
            log.write("sample", step=step, prompt=asked, text=text)
            reporter.line(f"sample {step}/{total}  {_last_line(asked)!r} -> {text!r}")

    def save(path) -> None:
        adapters.save_adapter(path, lora, config.lora, str(checkpoint), {"components": config.components()})

    with Reporter(total) as reporter:
        for line in _plan_lines(plan):
            reporter.line(line)
        if valid:
            validate(0)
        sample(0)

        loss, record = None, {}
        for step in range(1, total + 1):
            # ---- one update: gradients of its micro-batches simply add up
            clock = time.perf_counter()
            micro_batches = batches.take(train.accumulate)
            examples = list(chain.from_iterable(micro_batches))
            loss, metrics, grads = _gradients(engine, micro_batches, Totals.of(examples, method.spans()), config, step)
            grads, norm = clip_by_global_norm(grads, train.clip_norm)
            _stop_if_not_finite(step, loss, norm, grads)
            lora.update(optimizer.update(lora.params(), grads, step))
            del grads
            seconds = time.perf_counter() - clock

            # ---- report, validate, save
            tokens = sum(len(sequence) for example in examples for sequence in example.branches.values())
            supervised = sum(sequence.supervised for example in examples for sequence in example.branches.values())
            window.add({"loss": loss, "grad_norm": norm, **metrics}, tokens, supervised, seconds)
            reporter.advance()
            if step % train.report_every == 0 or step in (1, total):
                rate = learning_rate_at(step, config.optim, total)
                record = {**window.report(), "learning_rate": rate, **_memory()}
                log.write("train", step=step, **record)
                reporter.values("train", step, total, record)
                backend.tune()  # the load of the machine may have changed
            if valid and (step == total or train.validate_every and step % train.validate_every == 0):
                validate(step)
            if train.checkpoint_every and step % train.checkpoint_every == 0:
                name = f"checkpoints/step-{step:05d}"
                progress = {"step": step, "data": batches.position, "updates": total}
                folder.save(
                    name,
                    lambda path: adapters.save_checkpoint(
                        path, lora, config.lora, str(checkpoint), optimizer.state(), progress
                    ),
                    step,
                )
                log.write("event", step=step, event="checkpoint", path=name)

        if total:
            sample(total)
    folder.save("adapter", save)
    summary = {
        "updates": total,
        "seconds": round(time.perf_counter() - started, 1),
        "final": {"train_loss": loss, **({"val": trajectory[-1]} if trajectory else {})},
        "best_loss": best.get("loss"),
        "best_step": best.get("step"),
        "best_margin": best.get("margin"),
        "tokens_per_second": record.get("tokens_per_second"),
        **_memory(),
        "trajectory": trajectory,
    }
    write_json(folder.path / "metrics.json", summary)
    return summary


def _gradients(
    engine: StepEngine, micro_batches: Sequence[Sequence[Example]], totals: Totals, config: RunConfig, step: int
) -> tuple[float, dict[str, float], Params]:
    """Loss, metrics and gradients of one update; each micro-batch is evaluated before the next one is built."""
    losses, metrics, grads = [], [], {}
    for number, batch in enumerate(micro_batches):
        # a key of its own for every micro-batch of the run: dropout repeats with the seed and never otherwise
        key = mx.random.key((config.seed << 32) + (step * len(micro_batches) + number))
        result = engine.step(batch, totals, key if config.lora.dropout else None)
        grads = {name: grads[name] + value if grads else value for name, value in result.grads.items()}
        mx.eval(grads)
        losses.append(result.loss.item())
        metrics.append(result.metrics)
        del result
    return sum(losses), _sum_metrics(metrics), grads


def _sum_metrics(shares: Sequence[dict[str, mx.array]]) -> dict[str, float]:
    """Metrics are shares of a mean, so they add up."""
    return {name: sum(metrics[name].item() for metrics in shares) for name in shares[0]}


def _stop_if_not_finite(step: int, loss: float, norm: float, grads: Params) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    bad = next((name for name, g in grads.items() if not mx.isfinite(g).all().item()), "none of the gradients")
    raise NonFiniteError(
        f"step {step}: loss is {loss} and the gradient norm is {norm} (first non-finite tensor: {bad}); nothing was "
        "updated or saved by this step. Lower optim.learning_rate, or check the data and the base weights."
    )


def _memory() -> dict[str, float]:
    """Peak since the run began and memory in use now, in units of 1e9 bytes."""
    return {
        "peak_gb": round(mx.get_peak_memory() / 1e9, 3),
        "active_gb": round(mx.get_active_memory() / 1e9, 3),
    }


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    shown = {name: value for name, value in plan.items() if name != "ranks"}
    shown["components"] = ", ".join(f"{axis}={options['name']}" for axis, options in plan["components"].items())
    lines = []
    for name, value in shown.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"{name.replace('_', ' '):<18} {v}" for v in values]
    return lines


def _last_line(text: str) -> str:
    """The end of a prompt, short enough for one line of the console."""
    return text.strip()[-120:]

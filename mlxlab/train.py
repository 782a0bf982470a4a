"""The training loop. Read it from top to bottom; everything else in the package is called from here."""

from __future__ import annotations

import math
import time
from itertools import chain
from pathlib import Path
from typing import Any, Sequence

import mlx.core as mx

from mlxlab import adapters, backend, compat
from mlxlab.config import RunConfig
from mlxlab.data import Batches, load_examples
from mlxlab.engine import StepEngine
from mlxlab.errors import ConfigError, NonFiniteError
from mlxlab.interfaces import Example, Params, Setup, Totals
from mlxlab.interrupt import Interrupt
from mlxlab.lora import apply_lora, load_adapter_weights
from mlxlab.metrics import Best, MetricsLog, Reporter, Window, memory
from mlxlab.models.load import load, load_tokenizer, read_config
from mlxlab.optim import Optimizer, clip_by_global_norm, learning_rate_at
from mlxlab.resume import Checkpoint
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
    rows = train.batch_size or 2  # with batch_tokens: several
    parts = method, config.head, config.backward, config.layout, config.lora
    setup = Setup(*parts, rows, backend.device(), attention=config.attention)
    compat.check(setup)
    resumed = Checkpoint.find(train.resume, config.output_dir) if train.resume else None
    changes = resumed.check(config.resolved) if resumed else []
    checkpoint = config.source.folder()
    model_config = read_config(checkpoint)
    family = folder.registry.family_for(model_config["model_type"])
    compat.check(setup, family, model_config)

    # ---- data, model, adapter
    tokenizer = load_tokenizer(checkpoint)
    data = load_examples(config.data, tokenizer, method.records, config.seed)  # bad rows are named before weights load
    loaded = load(checkpoint, family, config.model.dtype, config.model.linear, tokenizer)
    blocks = [block.path for block in loaded.adapter.blocks()]
    lora = apply_lora(loaded.model, blocks, config.lora, config.seed, checkpoint, loaded.adapter.lora_targets)
    if config.lora.warm_start and not resumed:
        load_adapter_weights(lora, config.lora.warm_start)
    engine = StepEngine(loaded.adapter, lora, method, config.head, config.backward, config.layout, config.attention)

    # ---- how long, and what will happen
    batches = Batches(data.train, train.batch_size, config.seed, batch_tokens=train.batch_tokens)
    total = train.updates(batches.batches_per_epoch)
    optimizer = Optimizer(config.optim, total)
    valid = data.valid
    if 0 < train.validate_rows < len(valid):
        valid = [valid[i] for i in range(train.validate_rows)]
    if useless := list(train.without_effect(total, len(valid))):
        raise ConfigError("\n".join(f"{sentence}." for sentence in useless))
    start, window, best = 0, Window(), Best(train.best_metric, train.early_stop_patience)
    if resumed:
        resumed.restore(lora, optimizer, batches, window, best)
        start = resumed.step
    prompts = prompts_of(valid or data.train, method.branches[0], train.samples)
    longest = [data.train[int(i)] for i in data.train.lengths.argsort()[-rows:]]
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
    if resumed:
        plan["resumed"] = [f"{resumed.folder.absolute()}, after update {start}", *changes]
    folder.start(plan)
    log = MetricsLog(folder.path, folder.observe)
    log.write("meta", method=config.components()["method"]["name"], model=str(checkpoint), updates=total, plan=plan)
    if resumed:
        resumed.keep_best(folder, best)
    trajectory: list[dict[str, float]] = []
    if valid:
        valid_batches = Batches(valid, train.batch_size, 0, shuffle=False, batch_tokens=train.batch_tokens)
        valid_totals = Totals.of(valid, method.spans())

    def validate(step: int) -> None:
        """Loss and metrics of the validation rows; the best adapter so far is kept in best/."""
        values = [engine.evaluate(rows, valid_totals) for rows in valid_batches.epoch()]
        record = {"loss": sum(loss.item() for loss, _ in values), **_sum_metrics([m for _, m in values])}
        if not math.isfinite(record["loss"]):
            raise NonFiniteError(
                f"the validation loss after update {step} is {record['loss']}; the last good adapter is unchanged. "
                "Lower optim.learning_rate, or check the data and the base weights."
            )
        log.write("val", step=step, **record)
        reporter.values("val", step, total, record)
        trajectory.append({"step": step, **record})
        if best.update(step, record) and step:
            chosen = {"metric": best.metric, "value": best.state["value"], "step": step}
            folder.save("best", lambda path: save(path, best=chosen), step)
            log.write("event", step=step, event="best", loss=record["loss"])

    def sample(step: int) -> None:
        for prompt in prompts:
            text = generate(loaded.model, loaded.tokenizer, prompt, train.sample_tokens)
            asked = loaded.tokenizer.decode(prompt)
            log.write("sample", step=step, prompt=asked, text=text)
            reporter.line(f"sample {step}/{total}  {_last_line(asked)!r} -> {text!r}")

    def save(path: Path, **extra: Any) -> None:
        extra["components"] = config.components()
        adapters.save_adapter(path, lora, config.lora, str(checkpoint), extra)

    def save_checkpoint(step: int) -> Path:
        progress = {
            "step": step,
            "updates": total,
            "data": batches.position,
            "rows": batches.fingerprint,
            "window": window.state,
            "best": best.state,
            "config": config.resolved,
        }
        state = optimizer.state()
        write = lambda path: adapters.save_checkpoint(path, lora, config.lora, str(checkpoint), state, progress)
        path = folder.save(f"checkpoints/step-{step:05d}", write, step)
        log.write("event", step=step, event="checkpoint", path=str(path.relative_to(folder.path)))
        return path

    with Reporter(total, start) as reporter, Interrupt() as interrupt:
        for line in _plan_lines(plan):
            reporter.line(line)
        if not resumed:
            if valid:
                validate(0)
            sample(0)

        step, loss, record = start, None, {}
        for step in range(start + 1, total + 1):
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
                record = {**window.report(), "learning_rate": rate, **memory()}
                log.write("train", step=step, **record)
                reporter.values("train", step, total, record)
                backend.tune()  # the load of the machine may have changed
            if valid and (step == total or train.validate_every and step % train.validate_every == 0):
                validate(step)
            if interrupt.requested or train.checkpoint_every and step % train.checkpoint_every == 0:
                path = save_checkpoint(step)
            if interrupt.requested:
                reporter.line(f"stopped after update {step}; to continue, add train.resume={path}")
                raise KeyboardInterrupt
            if best.exhausted and step < total:
                log.write("event", step=step, event="early_stop", metric=best.metric, best_step=best.state["step"])
                reporter.line(f"stopped early: {best.metric} was best after update {best.state['step']}")
                break

        if total:
            sample(step)
    folder.save("adapter", save)
    summary = {
        "updates": step,
        "seconds": round(time.perf_counter() - started, 1),
        "final": {"train_loss": loss, **({"val": trajectory[-1]} if trajectory else {})},
        "best_loss": best.state["loss"],
        "best_step": best.state["step"],
        "best_margin": best.state["margin"],
        f"best_{best.metric}": best.state["value"],
        "tokens_per_second": record.get("tokens_per_second"),
        **memory(),
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

"""A run that was stopped goes on as if it had not been; early stopping; what is saved survives failures."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import read, runs

from mlxlab import adapters, train
from mlxlab.cli import main
from mlxlab.data import Batches
from mlxlab.discovery import load_plugins
from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.interrupt import Interrupt
from mlxlab.lora import LoraConfig, apply_lora
from mlxlab.methods.orpo import Orpo
from mlxlab.metrics import Best, Window, more_is_better
from mlxlab.models.decoder import Llama
from mlxlab.models.load import load
from mlxlab.models.tiny import VOCABULARY, TinyLlama
from mlxlab.optim import OptimConfig, Optimizer
from mlxlab.resume import Checkpoint
from mlxlab.rundir import RunFolder, find_runs
from mlxlab.testing import random_examples, randomize

QUICK = ["model=tiny_llama", "data=shouting", "train.samples=0", "lora.rank=4", "train.validate_rows=2"]
# everything that could be forgotten: moments, warm-up and schedule, position in the data, dropout, sums of a report
FULL = [
    "method=orpo",
    "train.iters=8",
    "train.accumulate=2",
    "train.report_every=3",
    "train.validate_every=3",
    "optim.warmup=3",
    "optim.learning_rate=1e-3",
    "lora.dropout=0.1",
]


@pytest.fixture
def run(elsewhere, capsys):
    """Call the program; returns (exit code, its run folder or None, error text)."""

    def call(*arguments: str):
        before = set(runs(elsewhere))
        capsys.readouterr()
        code = main([*QUICK, *arguments])
        new = sorted(set(runs(elsewhere)) - before)
        return code, new[-1] if new else None, capsys.readouterr().err

    return call


@pytest.fixture
def stopped(run):
    """A run of 3 updates with checkpoints after 1, 2 and 3."""
    code, folder, error = run("method=sft", "train.iters=3", "train.checkpoint_every=1")
    assert code == 0, error
    return folder


def records(folder: Path, *kinds: str) -> list[dict]:
    """Without time and what depends on it."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] in kinds]
    timing = {"time", "tokens_per_second", "supervised_tokens_per_second", "peak_gb", "active_gb"}
    return [{key: value for key, value in record.items() if key not in timing} for record in found]


def tensors(folder: Path, name: str = "adapters.safetensors") -> dict[str, mx.array]:
    return mx.load(str(folder / name))


def assert_equal(one: Path, other: Path, name: str = "adapters.safetensors") -> None:
    first, second = tensors(one, name), tensors(other, name)
    assert first.keys() == second.keys()
    assert [name for name in first if not mx.array_equal(first[name], second[name]).item()] == []


# -------------------------------------------------------------------------------------------------------------- resume
@pytest.mark.parametrize("extra", [[], ["train.batch_tokens=300"]], ids=["rows", "tokens"])
def test_a_resumed_run_equals_one_that_was_not_stopped(run, extra):
    """Losses, metrics, rates, validations and weights, bit for bit; numbered folders go on."""
    code, whole, error = run(*FULL, *extra, "train.checkpoint_every=2")
    assert code == 0, error
    code, rest, error = run(*FULL, *extra, "train.checkpoint_every=2", f"train.resume={whole}/checkpoints/step-00004")
    assert code == 0, error
    late = [record for record in records(whole, "train", "val") if record["step"] > 4]
    assert [record["step"] for record in late] == [6, 6, 8, 8]
    assert records(rest, "train", "val") == late
    assert_equal(rest / "adapter", whole / "adapter")
    for number in (6, 8):
        for name in ("adapters.safetensors", "optimizer.safetensors"):
            assert_equal(*[folder / f"checkpoints/step-0000{number}" for folder in (rest, whole)], name)
    assert {path.name for path in (rest / "checkpoints").iterdir()} == {"step-00006", "step-00008"}
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {f"step-0000{n}" for n in (2, 4, 6, 8)}
    [origin] = read(rest / "run.json")["plan"]["resumed"]
    assert origin == f"{whole}/checkpoints/step-00004, after update 4"
    best = [read(folder / "metrics.json") for folder in (rest, whole)]
    assert [b["best_loss"] for b in best] == [best[0]["best_loss"]] * 2 and best[0]["best_step"] == best[1]["best_step"]


def test_an_interrupted_run_can_be_continued(run, monkeypatch):
    """The update is finished and a checkpoint left, without train.checkpoint_every; `latest` finds it."""
    whole = run(*FULL)[1]
    compute = train._gradients

    def interrupted(engine, micro_batches, totals, config, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(engine, micro_batches, totals, config, step)

    monkeypatch.setattr(train, "_gradients", interrupted)
    code, first, error = run(*FULL)
    assert code == 130 and "stopping after this update" in error
    assert read(first / "status.json")["state"] == "INTERRUPTED"
    assert [path.name for path in (first / "checkpoints").iterdir()] == ["step-00005"]
    monkeypatch.setattr(train, "_gradients", compute)
    code, second, error = run(*FULL, "train.resume=latest")
    assert code == 0, error
    assert records(first, "train", "val") + records(second, "train", "val") == records(whole, "train", "val")
    assert_equal(second / "adapter", whole / "adapter")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_second_signal_stops_at_once(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_what_may_change(run, stopped):
    code, folder, error = run(
        "method=sft",
        "train.iters=4",
        "head=flash",
        "memory=segmented",
        "optim.learning_rate=1e-5",
        f"train.resume={stopped}",
        "output_dir=elsewhere",
    )
    assert code == 0, error
    assert read(folder / "metrics.json")["updates"] == 4
    origin, *changes = read(folder / "run.json")["plan"]["resumed"]
    assert origin.endswith("step-00003, after update 3")
    for change in ("train.iters: 3 -> 4", "head.name: fused -> flash", "optim.learning_rate: 0.0002 -> 1e-05"):
        assert change in changes
    assert not any("output_dir" in change or "resume" in change for change in changes)


@pytest.mark.parametrize("key, value", [
    ("lora.rank", 2), ("lora.warm_start", "somewhere"), ("model.seed", 1), ("method.name", "orpo"),
    ("method.scope", "full"), ("seed", 1), ("train.batch_size", 1), ("train.batch_tokens", 500),
    ("train.accumulate", 2), ("train.best_metric", "nll"), ("data.max_tokens", 64),
])  # fmt: skip
def test_what_would_be_another_run(key, value):
    node, _, option = key.rpartition(".")
    config = {"seed": 0, "output_dir": "outputs", "model": {"seed": 0}, "method": {"name": "sft", "scope": "response"}}
    config |= {"lora": {"rank": 4, "warm_start": None}, "data": {"path": "x", "max_tokens": 2048}}
    config |= {"train": {"batch_size": 2, "batch_tokens": None, "accumulate": 1, "best_metric": "loss", "iters": 3}}
    checkpoint = Checkpoint(Path("run/checkpoints/step-00003"), {"config": json.loads(json.dumps(config))})
    assert checkpoint.check({**config, "output_dir": "other", "train": {**config["train"], "iters": 5}}) == [
        "train.iters: 3 -> 5"
    ]
    (config[node] if node else config)[option] = value
    with pytest.raises(ConfigError, match=rf"^{key}={value} differs from the run that is continued \({key}=.* in run/"):
        checkpoint.check(config)


def test_what_may_not_change(run, stopped):
    for changes, sentence in (
        (["lora.rank=2"], "lora.rank=2 differs from the run that is continued (lora.rank=4 in "),
        (["data.path=mlxlab://everyday"], "data.path: these are not the rows that"),
        (["train.iters=3"], "is after update 3, and this run ends after 3; give train.iters > 3"),
    ):
        code, folder, error = run("method=sft", "train.iters=9", f"train.resume={stopped}", *changes)
        assert code == 1 and sentence in error and "Traceback" not in error
        assert read(folder / "status.json")["state"] == "FAILED"


def test_errors_name_what_is_missing(run, stopped, elsewhere):
    def refused(where):
        code, _, error = run("method=sft", "train.iters=4", f"train.resume={where}", "output_dir=empty")
        assert code == 1 and "Traceback" not in error
        return error

    assert "no run in" in refused("latest") and "empty has a checkpoint" in refused("latest")
    assert "nowhere is neither a checkpoint nor a run that has one" in refused("nowhere")
    (stopped / "checkpoints/step-00003/optimizer.safetensors").unlink()
    assert "optimizer.safetensors cannot be read" in refused(stopped)
    (stopped / "checkpoints/step-00003/progress.json").write_text('{"step": 3}', encoding="utf-8")
    assert "progress.json cannot be used (it has no 'updates')" in refused(stopped)
    shutil.rmtree(stopped / "checkpoints/step-00003")
    assert run("method=sft", "train.iters=3", f"train.resume={stopped}")[0] == 0  # from the one before


def test_latest_is_the_latest_with_a_checkpoint(tmp_path):
    def folder(name, started, *checkpoints):
        path = tmp_path / name
        for number in checkpoints:
            (path / f"checkpoints/step-{number:05d}").mkdir(parents=True)
            (path / f"checkpoints/step-{number:05d}/progress.json").write_text(
                json.dumps(dict.fromkeys(("updates", "data", "rows", "window", "best", "config")) | {"step": number}),
                encoding="utf-8",
            )
        path.mkdir(exist_ok=True)
        (path / "status.json").write_text(json.dumps({"started": started}), encoding="utf-8")

    folder("b", "2026-01-01T10", 5, 100000)
    folder("a", "2026-01-02T10", 5, 20, 10)
    folder("z", "2026-01-01T09", 7)
    folder("c", "2026-01-03T10")
    (tmp_path / "status.json").write_text("no JSON", encoding="utf-8")
    assert [path.name for path in find_runs(tmp_path)] == ["z", "b", "a", "c"]
    assert Checkpoint.find("latest", str(tmp_path)).folder == tmp_path / "a/checkpoints/step-00020"
    assert Checkpoint.find(str(tmp_path / "b"), "").step == 100000


def test_the_window_of_a_report_continues():
    straight, first, second = Window(), Window(), Window()
    for window, values in ((straight, (0.1, 0.2, 0.7)), (first, (0.1, 0.2))):
        for value in values:
            window.add({"loss": value}, 10, 5, 0.5)
    second.state = json.loads(json.dumps(first.state))
    second.add({"loss": 0.7}, 10, 5, 0.5)
    assert second.report() == straight.report()


# ----------------------------------------------------------------------------------------------------- best, early stop
def test_directions():
    assert [more_is_better(m) for m in ("accuracy", "margin", "reward_chosen", "logp_chosen")] == [True] * 4
    assert not any(map(more_is_better, ("loss", "nll", "odds", "kl", "reward_rejected", "logp_rejected")))


def test_best_counts_validations_without_a_better_one():
    best = Best("accuracy", patience=2)
    found = [best.update(step, {"loss": loss, "accuracy": share}) for step, (loss, share) in enumerate(
        ((3.0, 0.5), (1.0, 0.5), (2.0, 0.75))
    )]  # fmt: skip
    assert found == [True, False, True] and not best.exhausted
    assert best.state == {"value": 0.75, "step": 2, "since": 0, "loss": 1.0, "margin": None}
    continued = Best("accuracy", patience=2)
    best.update(3, {"loss": 2.0, "accuracy": 0.6})
    continued.state = json.loads(json.dumps(best.state))
    assert not continued.exhausted
    continued.update(4, {"loss": 2.0, "accuracy": 0.75})
    assert continued.exhausted
    with pytest.raises(ConfigError, match="train.best_metric=acuracy is not measured; .* did you mean 'accuracy'"):
        Best("acuracy").update(0, {"loss": 1.0, "accuracy": 1.0})


def test_training_that_gets_worse_ends_early(run):
    options = ["train.iters=12", "train.validate_every=1", "train.early_stop_patience=2"]
    code, folder, error = run("method=sft", *options, "optim.learning_rate=1.0", "train.clip_norm=0")
    assert code == 0, error
    losses = [record["loss"] for record in records(folder, "val")]
    lowest = losses.index(min(losses))
    summary = read(folder / "metrics.json")
    assert summary["updates"] == lowest + 2 == len(losses) - 1 < 12
    [event] = [record for record in records(folder, "event") if record["event"] == "early_stop"]
    assert (event["metric"], event["best_step"]) == ("loss", lowest)
    assert (folder / "adapter").is_dir() and summary["best_step"] == lowest


def test_best_by_another_metric(run):
    options = ["train.iters=3", "train.validate_every=1", "optim.learning_rate=1e-3"]
    code, folder, error = run("method=orpo", *options, "train.best_metric=margin", "train.checkpoint_every=1")
    assert code == 0, error
    margins = [record["margin"] for record in records(folder, "val")]
    step = margins.index(max(margins))
    assert step > 0
    summary = read(folder / "metrics.json")
    assert (summary["best_step"], summary["best_margin"]) == (step, max(margins))
    assert_equal(folder / "best", folder / f"checkpoints/step-{step:05d}")
    config = read(folder / "best" / "adapter_config.json")["mlxlab"]
    assert config["best"] == {"metric": "margin", "value": max(margins), "step": step}
    code, _, error = run("method=orpo", *options, "train.best_metric=margn")
    assert code == 1 and "train.best_metric=margn is not measured" in error and "did you mean 'margin'" in error


def test_the_best_adapter_goes_along(run):
    """A resumed run that only gets worse keeps the best adapter of the run before, if it is part of that run."""
    options = ["method=sft", "train.validate_every=1", "train.checkpoint_every=1", "optim.learning_rate=1e-3"]
    first = run(*options, "train.iters=3")[1]
    assert read(first / "metrics.json")["best_step"] == 3
    worse = run(*options, "train.iters=5", f"train.resume={first}", "optim.learning_rate=1.0", "train.clip_norm=0")[1]
    assert read(worse / "metrics.json")["best_step"] == 3
    assert_equal(worse / "best", first / "best")
    # the best of the first run came after update 2, so it is no part of what is continued
    options += ["train.iters=5", f"train.resume={first}/checkpoints/step-00002"]
    again = run(*options, "optim.learning_rate=1e-9")[1]
    assert read(again / "metrics.json")["best_step"] > 2
    assert (again / "best").is_dir()


# ------------------------------------------------------------------------------------------------------------ files
@pytest.fixture
def parts():
    loaded = load(TinyLlama().folder(), Llama, dtype="float32")
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], LoraConfig(rank=4), seed=0)
    randomize(lora)
    optimizer = Optimizer(OptimConfig(learning_rate=0.1), 9)
    params = lora.params()
    lora.update(optimizer.update(params, {name: mx.ones_like(value) for name, value in params.items()}, 1))
    return lora, optimizer, Batches(random_examples(Orpo(), VOCABULARY), 1, 0)


def write(folder: RunFolder, lora, optimizer, batches) -> Path:
    progress = {"step": 1, "updates": 9, "data": batches.position, "rows": batches.fingerprint, "config": {}}
    progress |= {"window": Window().state, "best": Best().state}
    state = optimizer.state()
    save = lambda path: adapters.save_checkpoint(path, lora, LoraConfig(rank=4), "base", state, progress)
    return folder.save("checkpoints/step-00001", save, 1)


def test_nothing_is_read_after_restoring(tmp_path, parts):
    """Tensors that are loaded when they are used would be lost with their file, or saved over it."""
    lora, optimizer, batches = parts
    path = write(RunFolder(tmp_path, load_plugins()), *parts)
    wanted = {**lora.params(), **optimizer.state()}
    mx.eval(wanted)
    randomize(lora, seed=1)
    other = Optimizer(OptimConfig(learning_rate=0.1), 9)
    Checkpoint.find(str(path), "").restore(lora, other, batches, Window(), Best())
    for file in path.iterdir():
        file.write_bytes(b"")
    found = {**lora.params(), **other.state()}
    assert found.keys() == wanted.keys() and all(mx.array_equal(found[n], wanted[n]).item() for n in wanted)


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, parts):
    """Files may not grow beyond 64 KiB here, which MLX sees as a write that fails."""
    folder = RunFolder(tmp_path, load_plugins())
    path = write(folder, *parts)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert len(before["optimizer.safetensors"]) > 2**16
    randomize(parts[0], seed=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-00001 cannot be written \(.* needs \d+ bytes.*unchanged"):
            write(folder, *parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert [p.name for p in path.parent.iterdir()] == ["step-00001"]

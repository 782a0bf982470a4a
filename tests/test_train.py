"""Whole runs of tiny models through the command line: what is learned, written, repeated and refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxlab.cli import main
from mlxlab.engine import StepEngine
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import Totals
from mlxlab.lora import LoraConfig, apply_lora, load_adapter_weights
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.dpo import Dpo
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft
from mlxlab.models.decoder import Llama
from mlxlab.models.load import load, walk
from mlxlab.models.tiny import VOCABULARY, TinyLlama
from mlxlab.testing import random_examples, randomize, relative_difference
from mlxlab.train import _gradients

QUICK = ["model=tiny_llama", "data=shouting", "train.samples=0", "lora.rank=4"]


@pytest.fixture
def run(elsewhere, capsys):
    """Call the program; returns (exit code, run folder or None, error text)."""

    def call(*arguments: str):
        before = set(folders(elsewhere))
        code = main([*QUICK, *arguments])
        new = sorted(set(folders(elsewhere)) - before)
        return code, new[-1] if new else None, capsys.readouterr().err

    return call


def folders(root: Path) -> list[Path]:
    return [status.parent for status in root.glob("outputs/**/status.json")]


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def weights(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "adapter" / "adapters.safetensors"))


def equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(mx.array_equal(first[name], second[name]).item() for name in first)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma4"])
@pytest.mark.parametrize("method, rate", [("orpo", 1e-3), ("dpo", 1e-3)])
def test_a_trivial_preference_is_learned(run, model, method, rate):
    """Positive control: held-out accuracy 1.0 and a growing margin."""
    code, folder, _ = run(
        f"model={model}",
        f"method={method}",
        "memory=[segmented,prefix_shared]",
        "head=flash",
        "train.epochs=6",
        f"optim.learning_rate={rate}",
        "train.batch_size=4",
    )
    assert code == 0
    first, *_, last = records(folder, "val")
    assert last["accuracy"] == 1.0
    assert last["margin"] > first["margin"] + 0.5


def test_what_a_run_leaves_behind(run):
    code, folder, _ = run(
        "method=orpo",
        "train.iters=6",
        "train.report_every=2",
        "train.validate_every=3",
        "train.checkpoint_every=4",
        "train.samples=1",
        "train.sample_tokens=4",
    )
    assert code == 0
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "COMPLETED" and math.isfinite(status["best_loss"])
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kinds[0] == "meta" and set(kinds) == {"meta", "train", "val", "sample", "event"}
    train, val = records(folder, "train"), records(folder, "val")
    assert [r["step"] for r in train] == [1, 2, 4, 6] and [r["step"] for r in val] == [0, 3, 6]
    shared = {"loss", "accuracy", "margin", "nll", "odds"}
    assert shared <= val[0].keys()
    own = {"learning_rate", "grad_norm", "tokens_per_second", "supervised_tokens_per_second", "peak_gb", "active_gb"}
    assert shared | own <= train[0].keys()
    assert [r["step"] for r in records(folder, "sample")] == [0, 6]
    summary = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert summary["best_loss"] == min(r["loss"] for r in val) and summary["best_margin"] == max(
        r["margin"] for r in val
    )
    assert {f.name for f in (folder / "checkpoints").iterdir()} == {"step-00004"}
    names = {"adapters.safetensors", "adapter_config.json", "optimizer.safetensors", "progress.json"}
    assert {f.name for f in (folder / "checkpoints" / "step-00004").iterdir()} == names
    for name in ("adapter", "best"):
        assert {f.name for f in (folder / name).iterdir()} == {"adapters.safetensors", "adapter_config.json"}
    assert {f.name for f in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    plan = json.loads((folder / "run.json").read_text(encoding="utf-8"))["plan"]
    assert plan["updates"] == 6 and set(plan["ranks"].values()) == {4}
    assert plan["attention"].startswith("auto; longest rows: ") and "(window 12)" in plan["attention"]


def test_training_changes_the_adapter_and_not_the_base(run):
    checkpoint = TinyLlama(bits=8).folder() / "model.safetensors"
    before = checkpoint.read_bytes()
    code, folder, _ = run("model.bits=8", "method=orpo", "train.iters=1")
    assert code == 0 and checkpoint.read_bytes() == before
    changed = [
        name for name, value in weights(folder).items() if name.endswith("lora_b") and mx.abs(value).max().item()
    ]
    assert len(changed) == 35


def test_seed_0_is_a_seed(run):
    runs = []
    for seed, disturbance in ((0, 1), (0, 2), (42, 1)):
        mx.random.seed(disturbance)
        runs.append(run("method=dpo", f"seed={seed}", "train.iters=4", "lora.dropout=0.1", "train.report_every=1")[1])
    assert equal(runs[0], runs[1]) and not equal(runs[0], runs[2])
    losses = [[r["loss"] for r in records(folder, "train")] for folder in runs]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("method", [Sft(), Dpo(), Orpo()], ids=repr)
def test_accumulation_equals_a_larger_batch(method):
    """4 rows at once, 1 x 4, and 2 x 2 are one update; the rows differ in length, so a mean of means would not be."""
    loaded = load(TinyLlama().folder(), Llama, dtype="float32")
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], LoraConfig(rank=4, scale=2.0), seed=0)
    randomize(lora)
    rows = random_examples(method, VOCABULARY, rows=4)
    engine = StepEngine(loaded.adapter, lora, method, Naive(), Plain(), Separate())
    config = SimpleNamespace(seed=0, lora=LoraConfig())
    totals = Totals.of(rows, method.spans())
    loss, metrics, grads = _gradients(engine, [rows], totals, config, 1)
    for split in ([rows[:1], rows[1:2], rows[2:3], rows[3:]], [rows[:2], rows[2:]]):
        other, other_metrics, other_grads = _gradients(engine, split, totals, config, 1)
        assert other == pytest.approx(loss, abs=1e-5)
        assert relative_difference(other_grads, grads) < 1e-5
        assert other_metrics == pytest.approx(metrics, abs=1e-4)


def test_strategies_train_to_the_same_weights(run):
    reference = run("method=orpo", "memory=none", "head=naive", "train.iters=3", "optim.learning_rate=1e-3")[1]
    for memory, head in (("segmented", "flash"), ("[checkpoint,prefix_shared]", "fused"), ("mlp_split", "chunked")):
        folder = run("method=orpo", f"memory={memory}", f"head={head}", "train.iters=3", "optim.learning_rate=1e-3")[1]
        for name, value in weights(folder).items():
            assert mx.allclose(value, weights(reference)[name], rtol=1e-2, atol=1e-4), (memory, head, name)


def test_warm_start_continues_from_an_adapter(run):
    first = run("method=sft", "train.iters=8", "optim.learning_rate=1e-3")[1]
    code, second, _ = run("method=sft", "train.iters=0", f"lora.warm_start={first / 'adapter'}")
    assert code == 0 and equal(first, second)
    assert records(second, "val")[0]["loss"] == pytest.approx(records(first, "val")[-1]["loss"], rel=1e-6)
    code, _, error = run("method=sft", "train.iters=1", "lora.rank=2", f"lora.warm_start={first / 'adapter'}")
    assert code == 1 and "this run needs [64, 2]" in error.replace("(", "[").replace(")", "]")


def test_a_step_that_is_not_finite_stops_the_run(run):
    code, folder, error = run("method=sft", "train.iters=40", "optim.learning_rate=1e30", "train.clip_norm=0")
    assert code == 1
    assert "Lower optim.learning_rate" in error and "step" in error
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "FAILED" and "not" in status["error"] or "nan" in status["error"]
    assert not (folder / "adapter").exists()


def test_every_method_memory_and_head_in_one_sweep(elsewhere, capsys):
    code = main(
        [
            "-m",
            "method=sft,dpo,orpo",
            "memory=none,segmented",
            "head=naive,flash",
            *QUICK,
            "train.iters=1",
            "train.validate_rows=2",
        ]
    )
    output = capsys.readouterr().out
    assert code == 0
    assert len(folders(elsewhere)) == 12
    assert output.count("COMPLETED") >= 12


def test_an_impossible_combination_fails_alone(elsewhere, capsys):
    code = main(["-m", "method=sft,orpo", "memory=prefix_shared", *QUICK, "train.iters=1", "train.validate_rows=2"])
    captured = capsys.readouterr()
    assert code == 1
    assert "use memory.layout=separate" in captured.err
    states = sorted(json.loads((f / "status.json").read_text(encoding="utf-8"))["state"] for f in folders(elsewhere))
    assert states == ["COMPLETED", "FAILED"]


@pytest.mark.parametrize("bits", [0, 8])
def test_plain_mlx_lm_loads_the_adapter(run, bits):
    from mlx_lm import load as stock_load

    code, folder, _ = run(
        "method=sft",
        f"model.bits={bits}",
        "train.iters=4",
        "optim.learning_rate=1e-2",
        "lora.rslora=true",
        "lora.num_layers=3",
    )
    assert code == 0
    base = TinyLlama(bits=bits).folder()
    ids = mx.array([[1, 87, 85, 71, 84, 201, 74, 75, 2, 201]])
    stock = stock_load(str(base))[0](ids)
    adapted = stock_load(str(base), adapter_path=str(folder / "adapter"))[0](ids)
    assert mx.abs(adapted - stock).max().item() > 0.01
    # and it computes what was trained
    loaded = load(base, Llama, dtype="float32")
    config = LoraConfig(rank=4, rslora=True, num_layers=3)
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], config, seed=5)
    load_adapter_weights(lora, folder / "adapter")
    assert mx.allclose(walk(loaded.adapter, ids), adapted, rtol=1e-3, atol=1e-3)


def test_the_program_runs_from_another_folder(tmp_path):
    command = [sys.executable, "-m", "mlxlab", *QUICK, "method=orpo", "train.iters=1", "train.validate_rows=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(folders(tmp_path)) == 1 and "run folder:" in done.stdout

"""`mlxlab evaluate`: right numbers, honest intervals, any split, any folder, clear refusals."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import read, rows_of, runs

from mlxlab.cli import main
from mlxlab.engine import StepEngine
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import Totals
from mlxlab.lora import LoraConfig, apply_lora
from mlxlab.measure import Measured, bootstrap, measure, perplexity, wilson
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.dpo import Dpo
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft
from mlxlab.models.decoder import Llama
from mlxlab.models.load import load, walk
from mlxlab.models.tiny import VOCABULARY, TinyLlama
from mlxlab.testing import random_examples, randomize

QUICK = ["model=tiny_llama", "data=jsonl", "data.path=rows", "train.samples=0", "lora.rank=4"]
TRAIN = ["method=orpo", "train.iters=2", "train.checkpoint_every=1", "optim.learning_rate=1e-3"]
ROWS = [
    {"prompt": f"Say the number {i}.", "chosen": f"It is {i}!" + "!" * (i % 3), "rejected": f"no, not {i}"}
    for i in range(6)
]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def trained(elsewhere, capsys):
    """A run on rows of its own, started with a relative path."""
    for name, part in (("train", ROWS[:4]), ("valid", ROWS[2:]), ("test", ROWS[:5])):
        write_rows(elsewhere / "rows" / f"{name}.jsonl", part)
    assert main([*QUICK, *TRAIN]) == 0, capsys.readouterr().err
    return runs(elsewhere)[0]


@pytest.fixture
def call(capsys):
    def call(*arguments: str):
        capsys.readouterr()
        code = main(["evaluate", *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def value(result: dict, column: str = "adapter") -> dict[str, float]:
    return {name: columns[column]["value"] for name, columns in result["metrics"].items()}


# ----------------------------------------------------------------------------------------------------------- intervals
@pytest.mark.parametrize("successes, count, low, high", [
    (8, 10, 0.4901625, 0.9433178),
    (0, 10, 0.0, 0.2775328),
    (10, 10, 0.7224672, 1.0),
    (1, 1, 0.2065493, 1.0),
    (500, 1000, 0.4690696, 0.5309304),
])  # fmt: skip
def test_wilson(successes, count, low, high):
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-6)
    assert wilson(0, 12)[0] == 0 and wilson(12, 12)[1] == 1


def test_wilson_needs_a_share():
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson(3, 2)


def test_bootstrap_of_a_mean_is_about_two_standard_errors():
    rows = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap(rows)
    error = rows.std() / math.sqrt(400)
    assert (low, high) == pytest.approx((rows.mean() - 1.96 * error, rows.mean() + 1.96 * error), abs=0.15 * error)
    assert bootstrap(rows) == (low, high)
    assert bootstrap(rows[:1]) is None


def test_bootstrap_takes_whole_rows():
    """Rows of equal -log p per token have one perplexity, however many tokens they have."""
    rows = np.array([[2.0, 1.0], [20.0, 10.0], [200.0, 100.0]])
    assert perplexity(rows) == pytest.approx(math.exp(2))
    assert bootstrap(rows, perplexity) == pytest.approx((math.exp(2), math.exp(2)))


# --------------------------------------------------------------------------------------------------------- measurement
@pytest.fixture(scope="module")
def model():
    loaded = load(TinyLlama().folder(), Llama, dtype="float32")
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], LoraConfig(rank=4, scale=2.0), seed=0)
    randomize(lora)
    return loaded, lora


@pytest.mark.parametrize("method", [Sft(), Sft("full"), Dpo(), Orpo(), Orpo(scope="response")], ids=repr)
@pytest.mark.parametrize("base", [False, True], ids=["adapter", "base"])
def test_every_number_is_that_of_the_plain_computation(model, method, base):
    loaded, lora = model
    rows = random_examples(method, VOCABULARY, rows=5)
    engine = StepEngine(loaded.adapter, lora, Measured(method), Naive(), Plain(), Separate())
    result = {name: value["value"] for name, value in measure(engine, rows, base).items()}
    # the method alone, all rows in one batch
    alone = StepEngine(loaded.adapter, lora, method, Naive(), Plain(), Separate())
    with lora.disabled() if base else lora.bound({}):
        loss, metrics = alone.evaluate(rows, Totals.of(rows, method.spans()))
        nll = tokens = 0.0
        for row in rows:
            sequence = row.branches[method.branches[0]]
            logits = walk(loaded.adapter, mx.array(sequence.ids)[None])[0]
            logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            for t in np.flatnonzero(sequence.response[1:]) + 1:
                nll -= logps[int(t) - 1, int(sequence.ids[t])].item()
                tokens += 1
    assert result.pop("perplexity") == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert result == pytest.approx({"loss": loss.item(), **{n: v.item() for n, v in metrics.items()}}, abs=1e-4)


def test_a_method_sees_its_own_spans_only(model):
    """Perplexity needs the response of the first branch, which this method does not score."""

    @dataclass(frozen=True)
    class Unlikely(Orpo):
        def spans(self):
            return {"rejected": frozenset({"response"})}

        def loss(self, scores, reference):
            return scores.token_mean(*scores.spans), {}

    loaded, lora = model
    rows = random_examples(Unlikely(), VOCABULARY, rows=3)
    result = measure(StepEngine(loaded.adapter, lora, Measured(Unlikely()), Naive(), Plain(), Separate()), rows)
    alone = StepEngine(loaded.adapter, lora, Unlikely(), Naive(), Plain(), Separate())
    loss, _ = alone.evaluate(rows, Totals.of(rows, Unlikely().spans()))
    assert result["loss"]["value"] == pytest.approx(loss.item(), abs=1e-5)
    assert result["perplexity"]["value"] > 1


def test_intervals_are_of_the_rows(model):
    loaded, lora = model
    method = Orpo()
    rows = random_examples(method, VOCABULARY, rows=6)
    engine = StepEngine(loaded.adapter, lora, Measured(method), Naive(), Plain(), Separate())
    result = measure(engine, rows)
    alone = StepEngine(loaded.adapter, lora, method, Naive(), Plain(), Separate())
    single = [alone.evaluate([row], Totals.of([row], method.spans()))[1] for row in rows]
    margins = np.array([metrics["margin"].item() for metrics in single])
    right = sum(metrics["accuracy"].item() for metrics in single)
    assert 0 < right < 6, "the test needs rows of both kinds"
    assert (result["margin"]["low"], result["margin"]["high"]) == pytest.approx(bootstrap(margins), abs=1e-4)
    assert (result["accuracy"]["low"], result["accuracy"]["high"]) == wilson(round(right), 6)
    assert result["margin"]["low"] < result["margin"]["value"] < result["margin"]["high"]


def test_intervals_weigh_rows_as_the_metric_does(model):
    """The token mean of sft is the logarithm of perplexity, so their intervals agree."""
    loaded, lora = model
    rows = random_examples(Sft(), VOCABULARY, rows=6)
    engine = StepEngine(loaded.adapter, lora, Measured(Sft()), Naive(), Plain(), Separate())
    result = measure(engine, rows)
    for end in ("low", "value", "high"):
        assert result["nll"][end] == pytest.approx(math.log(result["perplexity"][end]), abs=1e-5)
        assert result["loss"][end] == pytest.approx(result["nll"][end], abs=1e-6)


# ------------------------------------------------------------------------------------------------------------- command
def test_the_numbers_of_training(trained, call):
    """The adapter as after the last update, the base as before the first: LoRA starts as nothing."""
    code, out, error = call("latest", "adapter=adapter", "samples=2")
    assert code == 0, error
    result = read(trained / "evaluation-valid.json")
    lines = (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, *_, last = [record for record in map(json.loads, lines) if record["kind"] == "val"]
    for column, record in (("adapter", last), ("base", first)):
        measured = value(result, column)
        measured.pop("perplexity")
        assert measured == pytest.approx({name: record[name] for name in measured}, abs=1e-5)
    assert value(result)["margin"] > value(result, "base")["margin"]
    assert result["rows"] == 4 and result["adapter"] == str(trained / "adapter")
    accuracy = result["metrics"]["accuracy"]["adapter"]
    assert (accuracy["low"], accuracy["high"]) == wilson(round(4 * accuracy["value"]), 4)
    assert len(result["samples"]) == 2 and all(set(s) == {"prompt", "adapter", "base"} for s in result["samples"])
    assert "Say the number 2." in result["samples"][0]["prompt"]
    assert f"written to {trained / 'evaluation-valid.json'}" in out
    cells = rows_of(out)
    assert {"loss", "margin", "accuracy", "perplexity"} <= {row[0] for row in cells}
    assert not list(trained.glob(".evaluation*"))


def test_generation_shows_what_the_adapter_does(trained, call):
    """With a large update the texts differ, and without the adapter they are those of the base."""
    folder = trained / "adapter"
    weights = mx.load(str(folder / "adapters.safetensors"))
    mx.eval(weights)
    noise = mx.random.split(mx.random.key(0), len(weights))
    changed = {name: w + 0.5 * mx.random.normal(w.shape, key=key) for (name, w), key in zip(weights.items(), noise)}
    mx.save_safetensors(str(folder / "adapters.safetensors"), changed)
    assert call(trained, "adapter=adapter", "samples=1")[0] == 0
    [changed] = read(trained / "evaluation-valid.json")["samples"]
    assert call(trained, "adapter=checkpoints/step-00001", "samples=1")[0] == 0
    [other] = read(trained / "evaluation-valid.json")["samples"]
    assert changed["base"] == other["base"] != changed["adapter"]


def test_which_adapter(trained, call, tmp_path):
    used = lambda *arguments: (
        call(trained, "rows=1", "samples=0", *arguments) and Path(read(trained / "evaluation-valid.json")["adapter"])
    )
    assert used() == trained / "best"
    assert used("adapter=checkpoints/step-00001") == trained / "checkpoints/step-00001"
    shutil.copytree(trained / "adapter", tmp_path / "copy")
    assert used("adapter=copy") == tmp_path / "copy"
    shutil.rmtree(trained / "best")
    assert used() == trained / "adapter"
    shutil.rmtree(trained / "adapter")
    assert used() == trained / "checkpoints/step-00002"


def test_any_split_from_any_folder(trained, call, tmp_path, monkeypatch):
    """Rows are found from where the run was started; what is given now is relative to here."""
    other = tmp_path / "other"
    write_rows(other / "mine.jsonl", ROWS[:3])
    write_rows(other / "rows" / "valid.jsonl", ROWS[:1])  # not the rows of the run
    monkeypatch.chdir(other)
    for split, count in (("train", 4), ("valid", 4), ("test", 5), ("mine.jsonl", 3)):
        code, _, error = call(trained, f"split={split}", "samples=0")
        assert code == 0, error
        assert read(trained / f"evaluation-{split.removesuffix('.jsonl')}.json")["rows"] == count
    assert os.getcwd() == str(other)
    write_rows(other / "rows" / "train.jsonl", ROWS[:2])
    assert call(trained, "split=train", "samples=0", "data.path=rows")[0] == 0
    assert read(trained / "evaluation-train.json")["rows"] == 2


def test_another_head_and_layout_measure_the_same(trained, call):
    results = []
    for overrides in ([], ["head=naive", "memory.layout=prefix_shared"], ["head=flash", "head.tile_vocab=64"]):
        code, _, error = call(trained, "samples=0", *overrides)
        assert code == 0, error
        results.append(read(trained / "evaluation-valid.json"))
    assert results[1]["components"]["head"] == {"name": "naive"}
    assert results[2]["components"]["head"]["tile_vocab"] == 64
    for other in results[1:]:
        assert value(other) == pytest.approx(value(results[0]), abs=1e-4)


def test_refusals(trained, call, elsewhere):
    def refused(*arguments):
        code, _, error = call(*arguments)
        assert code == 1
        return error

    assert "evaluate needs a run folder" in refused()
    assert "evaluate needs a run folder" in refused("split=valid")
    assert "nowhere is not the folder of a run: it has no config.yaml" in refused("nowhere")
    assert f"did you mean {trained}" in refused(trained / "adapter")
    assert "no run in" in refused("latest", "output_dir=nothing")
    error = refused(trained, "adapter=checkpoints/step-00003")
    assert "neither in" in error and "did you mean 'checkpoints/step-0000" in error
    error = refused(trained, "split=tests")
    assert "neither a split nor a file" in error and "did you mean 'test'" in error
    assert "not of the form key=value" in refused(trained, "head")
    assert "rows must be an integer >= 0, got 'few'" in refused(trained, "rows=few")
    assert "memory.KEY=VALUE" in refused(trained, "memory=segmented")
    assert "did you mean 'chunk_tokens'" in refused(trained, "head.chunk_token=5")
    assert "head=flsh does not exist" in refused(trained, "head=flsh")
    assert "adapter=" in refused(trained, "lora.rank=2") and "this run needs" in refused(trained, "lora.rank=2")
    (elsewhere / "rows" / "test.jsonl").unlink()
    assert "rows has no test.jsonl" in refused(trained, "split=test")
    for name in ("best", "adapter", "checkpoints"):
        shutil.rmtree(trained / name)
    assert "has no adapter" in refused(trained)


def test_help(call):
    code, out, _ = call("--help")
    assert code == 0 and "adapter=checkpoints/step-" in out

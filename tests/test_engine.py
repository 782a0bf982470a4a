"""The step engine: known starting values, dropout, recomputation, and nothing that stays behind."""

from __future__ import annotations

import gc
import itertools
import math
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxlab.engine import StepEngine
from mlxlab.heads.chunked import Chunked
from mlxlab.heads.flash import Flash
from mlxlab.heads.fused import Fused
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import Example, TokenSequence, Totals
from mlxlab.lora import LoraConfig, apply_lora
from mlxlab.memory.backward.checkpoint import Checkpoint
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.backward.segmented import Segmented
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.dpo import Dpo
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft
from mlxlab.models.decoder import Llama
from mlxlab.models.load import load
from mlxlab.models.tiny import VOCABULARY, TinyLlama
from mlxlab.testing import random_examples, randomize, relative_difference

BACKWARDS = [Plain(), Checkpoint(), Checkpoint("half"), Segmented(1), Segmented(2), Segmented(2, "half")]
LAYOUTS = [Separate(), PrefixShared()]
HEADS = [Naive(), Chunked(7), Fused(7), Flash(9, 50)]


def model(**options):
    loaded = load(TinyLlama(bits=8).folder(), Llama, dtype="float32")
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], LoraConfig(rank=4, **options), seed=0)
    return loaded.adapter, lora


@pytest.mark.parametrize("layout, backward, head", list(itertools.product(LAYOUTS, BACKWARDS, HEADS)), ids=repr)
def test_dpo_starts_at_ln_2(layout, backward, head):
    adapter, lora = model()
    batch = random_examples(Dpo(), VOCABULARY, rows=2)
    engine = StepEngine(adapter, lora, Dpo(), head, backward, layout)
    result = engine.step(batch, Totals.of(batch, Dpo().spans()))
    assert result.loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert result.metrics["margin"].item() == pytest.approx(0, abs=1e-5)


def test_evaluation_equals_the_training_loss():
    adapter, lora = model()
    randomize(lora)
    for method, layout in itertools.product((Sft(), Dpo(), Orpo()), LAYOUTS):
        if len(method.branches) == 1 and layout == PrefixShared():
            continue
        batch = random_examples(method, VOCABULARY, rows=3)
        engine = StepEngine(adapter, lora, method, Flash(9, 50), Segmented(2), layout)
        totals = Totals.of(batch, method.spans())
        loss, metrics = engine.evaluate(batch, totals)
        result = engine.step(batch, totals)
        assert loss.item() == pytest.approx(result.loss.item(), rel=1e-6)
        assert metrics.keys() == result.metrics.keys()


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_recomputation_repeats_dropout(layout):
    """Same key: every strategy has the value and gradient of the plain one. Other key: another value."""
    adapter, lora = model(dropout=0.3)
    randomize(lora)
    batch = random_examples(Orpo(), VOCABULARY)
    totals = Totals.of(batch, Orpo().spans())

    def step(backward, key):
        return StepEngine(adapter, lora, Orpo(), Fused(7), backward, layout).step(batch, totals, key)

    reference = step(Plain(), mx.random.key(1))
    for backward in BACKWARDS:
        mx.random.seed(0)  # the global generator has no say
        result = step(backward, mx.random.key(1))
        assert result.loss.item() == pytest.approx(reference.loss.item(), abs=1e-5)
        assert relative_difference(result.grads, reference.grads) < 1e-5
    assert abs(step(Plain(), mx.random.key(2)).loss.item() - reference.loss.item()) > 1e-4
    assert abs(step(Plain(), None).loss.item() - reference.loss.item()) > 1e-4


@pytest.mark.parametrize("backward", BACKWARDS, ids=repr)
def test_modules_are_as_before_after_a_step_that_fails(backward):
    adapter, lora = model(dropout=0.1)
    before = {name: value for name, value in lora.params().items()}

    class Broken(Llama):
        def run(self, block, *rest):
            if block.index == 3:
                raise ZeroDivisionError("broken")
            return super().run(block, *rest)

        def run_half(self, block, half, *rest):
            if block.index == 3:
                raise ZeroDivisionError("broken")
            return super().run_half(block, half, *rest)

    batch = random_examples(Dpo(), VOCABULARY)
    engine = StepEngine(Broken(adapter.model), lora, Dpo(), Naive(), backward, Separate())
    with pytest.raises(ZeroDivisionError, match="broken"):
        engine.step(batch, Totals.of(batch, Dpo().spans()), mx.random.key(0))
    assert all(lora.params()[name] is value for name, value in before.items())
    assert set(lora.scales.values()) == {20.0}
    assert all(module._key is None for module in lora.modules.values())


def test_checkpointing_runs_every_layer_twice_and_patches_nothing():
    adapter, lora = model()
    layer = type(adapter.blocks()[0].module.self_attn)
    original, calls = layer.__call__, []

    def counted(self, *arguments, **options):
        calls.append(1)
        return original(self, *arguments, **options)

    batch = random_examples(Sft(), VOCABULARY)
    totals = Totals.of(batch, Sft().spans())
    try:
        layer.__call__ = counted
        for _ in range(3):
            calls.clear()
            StepEngine(adapter, lora, Sft(), Naive(), Checkpoint(), Separate()).step(batch, totals)
            assert len(calls) == 2 * len(adapter.blocks())
            assert layer.__call__ is counted
    finally:
        layer.__call__ = original


@pytest.mark.parametrize("layout, backward", list(itertools.product(LAYOUTS, BACKWARDS)), ids=repr)
def test_active_memory_is_flat(layout, backward):
    adapter, lora = model()
    batch = random_examples(Orpo(), VOCABULARY)
    engine = StepEngine(adapter, lora, Orpo(), Fused(7), backward, layout)
    active = []
    for _ in range(20):
        engine.step(batch, Totals.of(batch, Orpo().spans()))
        gc.collect()
        active.append(mx.get_active_memory())
    assert active[-1] - active[2] < 1024


def test_memory_of_the_strategies():
    """A long sequence through a tiny model: checkpoint needs less than plain, segments of one layer less than half."""
    adapter, lora = model()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 768).astype(np.int32)
    batch = [Example({"completion": TokenSequence(ids, np.arange(768) >= 700)})]
    totals = Totals.of(batch, Sft().spans())

    def peak(backward, attention="fused"):
        engine = StepEngine(adapter, lora, Sft(), Fused(64), backward, Separate(), attention)
        engine.step(batch, totals)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.step(batch, totals)
        return mx.get_peak_memory() - before

    plain, checkpoint, segmented = (peak(b) for b in (Plain(), Checkpoint(), Segmented(1)))
    assert checkpoint < plain
    assert segmented < 0.5 * plain
    assert peak(Plain(), "blockwise") < 0.5 * plain


def test_empty_spans_and_single_tokens():
    """No prompt at all, and responses of one token."""
    ids = lambda *tokens: np.array(tokens, np.int32)
    batch = [
        Example(
            {
                "chosen": TokenSequence(ids(5, 6), np.array([True, True])),
                "rejected": TokenSequence(ids(5, 7), np.array([True, True])),
            }
        ),
    ]
    adapter, lora = model()
    totals = Totals.of(batch, Orpo().spans())
    for layout, backward, head in itertools.product(LAYOUTS, BACKWARDS, HEADS):
        result = StepEngine(adapter, lora, Orpo(), head, backward, layout).step(batch, totals)
        assert math.isfinite(result.loss.item())
        assert all(mx.isfinite(g).all().item() for g in result.grads.values())


@pytest.mark.parametrize("attention", ["fused", "blockwise"])
def test_on_a_gpu_what_is_used_again_is_compiled_but_for_blockwise_attention(monkeypatch, attention):
    """As on a GPU, with a stand-in for mx.compile that counts."""
    compiled = []
    monkeypatch.setattr("mlxlab.engine.backend", SimpleNamespace(device=lambda: "cuda"))
    monkeypatch.setattr(mx, "compile", lambda function: compiled.append(function) or function)
    adapter, lora = model()
    randomize(lora)
    batch = random_examples(Sft(), VOCABULARY)
    totals = Totals.of(batch, Sft().spans())
    engine = StepEngine(adapter, lora, Sft(), Fused(7), Segmented(1), Separate(), attention)
    losses = [engine.step(batch, totals).loss.item() for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    segments = 2 * len(adapter.blocks())  # forward and backward
    from_segments = [key for key, function in engine._compiled.items() if function in compiled and key[0] != "s"]
    assert len(from_segments) == (segments if attention == "fused" else 0)
    monkeypatch.setattr(Llama, "compiles", False)
    compiled.clear()
    StepEngine(adapter, lora, Sft(), Fused(7), Segmented(1), Separate(), attention).step(batch, totals)
    assert not compiled

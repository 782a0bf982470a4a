"""Every model family: equal to mlx-lm's forward pass, and trained under every memory option that it declares."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from families import TINY
from mlx_lm.models.cache import make_prompt_cache

from mlxlab import compat
from mlxlab.cli import main
from mlxlab.discovery import load_plugins
from mlxlab.errors import CompatError, ConfigError
from mlxlab.heads.flash import Flash
from mlxlab.heads.fused import Fused
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import Setup
from mlxlab.lora import LoraConfig, apply_lora
from mlxlab.memory.backward.checkpoint import Checkpoint
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.backward.segmented import Segmented
from mlxlab.memory.layouts.packed import Packed
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.orpo import Orpo
from mlxlab.models import decoder
from mlxlab.models.decoder import Llama
from mlxlab.models.load import load, walk
from mlxlab.models.qwen import Qwen
from mlxlab.models.report import markdown, support
from mlxlab.models.tiny import VOCABULARY, tiny_checkpoint
from mlxlab.testing import parity, random_examples, randomize, reference_step

TOLERANCE = 1e-5
# Stock logits that are rounded in another order: a bias that is part of the product.
BIASED = {"phi", "phimoe"}
# Stock forward passes that are not the generating one: without a cache, layers that share keys compute their own.
CACHED_ONLY = {"gemma3n"}
QUANTIZED = {
    **{name: ((4, 8), "affine") for name in ("llama", "gemma3", "gemma3n", "gemma4", "cohere2", "phi3", "minicpm3")},
    **{name: (4, "affine") for name in ("mixtral", "qwen3_moe", "granite", "falcon_h1", "lfm2")},
    "gpt_oss": (4, "mxfp4"),
}


def family_of(name: str):
    return load_plugins().family_for(TINY[name]["model_type"])


def model(name: str, bits=0, mode="affine", policy="auto"):
    """Adapter and LoRA of a tiny model; random leaves, so that nothing has a zero gradient."""
    loaded = load(tiny_checkpoint(TINY[name], bits, mode=mode), family_of(name), "float32", policy)
    adapter = loaded.adapter
    blocks = [block.path for block in adapter.blocks()]
    config = LoraConfig(rank=4, scale=2.0)
    lora = apply_lora(loaded.model, blocks, config, seed=0, family_targets=adapter.lora_targets)
    randomize(lora)
    return adapter, lora


@pytest.fixture(scope="module", params=TINY)
def tiny(request):
    """Name, adapter and LoRA; pytest runs all tests of one model before it makes the next."""
    return request.param, *model(request.param)


def relative(one: mx.array, other: mx.array) -> float:
    return (mx.abs(one - other).max() / mx.abs(other).max()).item()


def test_the_walk_is_the_stock_forward_pass(tiny, monkeypatch):
    """Bit for bit where the stock layers are called; windows are shorter than the sequence. Float32."""
    name, adapter, _ = tiny
    ids = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (2, 21)))
    generating = adapter.model(ids, cache=make_prompt_cache(adapter.model))
    assert relative(walk(adapter, ids), generating) < TOLERANCE
    monkeypatch.setattr(decoder, "on_cpu", lambda: False)
    logits = walk(adapter, ids)
    assert relative(logits, generating) < TOLERANCE
    if name not in CACHED_ONLY:
        stock = adapter.model(ids)
        assert mx.array_equal(logits, stock) or name in BIASED and relative(logits, stock) < TOLERANCE


def test_one_step_under_every_memory_option(tiny):
    _, adapter, lora = tiny
    check_steps(adapter, lora)


def test_every_default_target_is_in_its_family(tiny):
    _, adapter, lora = tiny
    for target in adapter.lora_targets:
        assert any(f".{path}".endswith(f".{target}") for path in lora.modules), target


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_step_with_quantized_weights(name):
    """Also experts, whose products are mx.gather_qmm; widths change from layer to layer where there are two."""
    adapter, lora = model(name, *QUANTIZED[name], policy="fused")
    kinds = [type(module).__name__ for _, module in adapter.model.named_modules()]
    assert any("Quantized" in kind for kind in kinds)
    check_steps(adapter, lora)


def check_steps(adapter, lora):
    method = Orpo()
    batch = random_examples(method, VOCABULARY, rows=2)
    reference = reference_step(adapter, lora, method, batch)
    assert all(mx.abs(gradient).max().item() > 0 for gradient in reference.grads.values())
    options = [(Checkpoint(), Separate(), Fused(7)), (Segmented(2), Separate(), Flash(9, 50))]
    if "prefix_cache" in adapter.features:
        options += [(Plain(), PrefixShared(), Naive()), (Segmented(1), PrefixShared(), Fused(7))]
    if "packing" in adapter.features:
        options.append((Segmented(1), Packed(40), Fused(7)))
    if "half_blocks" in adapter.features:
        options += [(Checkpoint("half"), Separate(), Naive()), (Segmented(2, "half"), Separate(), Fused(7))]
    for backward, layout, head in options:
        loss, gradient = parity(adapter, lora, method, head, backward, layout, batch, reference)
        assert loss < TOLERANCE and gradient < TOLERANCE, (backward, layout, head, loss, gradient)


@pytest.mark.parametrize("name", TINY)
def test_what_is_not_declared_is_refused_with_the_reason(name):
    family = family_of(name)
    for feature, backward, layout in (
        ("half_blocks", Checkpoint("half"), Separate()),
        ("prefix_cache", Plain(), PrefixShared()),
        ("packing", Plain(), Packed()),
    ):
        setup = Setup(Orpo(), Naive(), backward, layout, LoraConfig(), 1, "cpu")
        if feature in family.features:
            assert feature not in family.lacks
            compat.check(setup, family, TINY[name])
        else:
            sentence = f"needs the model feature {feature}, which .* lacks .{family.lacks[feature]}"
            with pytest.raises(CompatError, match=sentence):
                compat.check(setup, family, TINY[name])


def test_every_registered_family_has_a_tiny_model(elsewhere):
    types = {name for row in support(load_plugins()) for name in row.family.model_types}
    assert types == {config["model_type"] for config in TINY.values()}


# ---------------------------------------------------------------------------------------------------- the check at load
class Scaled(Llama):
    """Differs in one scale only."""

    def finish(self, state):
        return super().finish(state) * 1.001


class OffByOne(Llama):
    """Differs where a window ends only, which 16 tokens do not reach."""

    def windows(self):
        return [None if window is None else window + 1 for window in super().windows()]


@pytest.mark.parametrize("family, sentence", [(Scaled, "largest logit difference"), (OffByOne, "window of 100 tokens")])
def test_a_family_that_differs_is_refused_at_load(family, sentence):
    folder = tiny_checkpoint({**TINY["llama"], "sliding_window": 100})
    load(folder, Llama, "float32")
    with pytest.raises(CompatError, match=f"does not reproduce model_type 'llama': .*{sentence}.*training refused"):
        load(folder, family, "float32")


@pytest.mark.parametrize("name", ["granite", "minicpm"])
def test_a_family_with_multipliers_is_no_qwen(name):
    with pytest.raises(CompatError, match="adapter Qwen does not reproduce model_type"):
        load(tiny_checkpoint(TINY[name]), Qwen, "float32")


@pytest.mark.parametrize(
    "name, change, sentence",
    [
        ("minicpm", {"tie_word_embeddings": True}, "tie_word_embeddings=true; set it to false"),
        ("mistral3", {"text_config": {"model_type": "mistral4"}}, "no support for mistral4 inside mistral3"),
    ],
)
def test_checkpoints_that_cannot_be_trained_are_refused_before_they_load(name, change, sentence):
    setup = Setup(Orpo(), Naive(), Plain(), Separate(), LoraConfig(), 1, "cpu")
    with pytest.raises(CompatError, match=sentence):
        compat.check(setup, family_of(name), {**TINY[name], **change})


# ------------------------------------------------------------------------------------------------------ what is trained
def test_experts_stay_frozen_by_default_and_are_refused_by_name():
    adapter, lora = model("mixtral")
    assert {path.rpartition(".")[2] for path in lora.modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    blocks = [block.path for block in adapter.blocks()]
    with pytest.raises(ConfigError, match="gate_proj matches .*, a SwitchLinear, and only linear layers can have LoRA"):
        apply_lora(adapter.model, blocks, LoraConfig(targets=("gate_proj",)), seed=0)


def test_family_targets_that_the_chosen_layers_lack_are_left_out():
    loaded = load(tiny_checkpoint(TINY["gemma4_text"]), family_of("gemma4_text"), "float32")
    blocks = [block.path for block in loaded.adapter.blocks()]
    targets = loaded.adapter.lora_targets
    lora = apply_lora(loaded.model, blocks, LoraConfig(num_layers=2), seed=0, family_targets=targets)
    names = {path.rpartition(".")[2] for path in lora.modules}
    assert names == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # those layers read a donor's keys


# ------------------------------------------------------------------------------------------------------------ the table
def test_the_readme_has_the_table_of_families(elsewhere):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert markdown(support(load_plugins())) in readme, "python -m mlxlab models --markdown prints the current table"


def test_the_command_prints_families_and_reasons(elsewhere, capsys):
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "cohere2" in out and "memory=mlp_split: attention and feed-forward stand" in out
    assert main(["models", "--json"]) == 1
    assert "mlxlab models takes --markdown or nothing, got --json" in capsys.readouterr().err

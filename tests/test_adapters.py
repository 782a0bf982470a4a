"""Adapter folders: mlx-lm computes what we compute, files are whole or absent, what does not fit is named."""

from __future__ import annotations

import json
import math
import os
import resource
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlxlab.adapters import load_adapter, save_adapter, save_checkpoint
from mlxlab.errors import CheckpointError
from mlxlab.lora import LoraConfig, apply_lora, load_adapter_weights
from mlxlab.models.decoder import Llama
from mlxlab.models.gemma4 import Gemma4
from mlxlab.models.load import load
from mlxlab.models.tiny import TinyGemma4, TinyLlama
from mlxlab.optim import OptimConfig, Optimizer
from mlxlab.registry import Registry
from mlxlab.rundir import RunFolder
from mlxlab.testing import randomize

IDS = mx.array([[1, 5, 9, 200, 7, 33]])
LLAMA, GEMMA = (TinyLlama, Llama), (TinyGemma4, Gemma4)


def make(model=LLAMA, bits=0, seed=0, **options):
    """Model, LoRA with random leaves, its options, the folder of the base."""
    source, family = model
    folder = source(bits=bits).folder()
    loaded = load(folder, family, "float32", "fused")
    config = LoraConfig(**{"rank": 4, **options})
    lora = apply_lora(loaded.model, [block.path for block in loaded.adapter.blocks()], config, seed, folder)
    randomize(lora, seed)
    return loaded.model, lora, config, folder


def same(lora, other) -> bool:
    theirs = other.params()
    return all(mx.array_equal(value, theirs[name]).item() for name, value in lora.params().items())


@pytest.fixture
def run_folder(tmp_path):
    registry = Registry()
    registry.hooks = SimpleNamespace(mlxlab_checkpoint_saved=SimpleNamespace(get_hookimpls=list))  # no observers
    return RunFolder(tmp_path / "run", registry)


@pytest.mark.parametrize(
    "model, bits, options",
    [
        (LLAMA, 0, {}),
        (LLAMA, 8, {}),
        (LLAMA, 8, {"rslora": True, "rank": 16}),
        (LLAMA, 0, {"num_layers": 2}),
        (LLAMA, 8, {"rank_scaling": "by_bits"}),  # one width for all layers, so one rank
        (LLAMA, 0, {"targets": ("self_attn.q_proj", "down_proj")}),
        (GEMMA, 8, {}),
        (GEMMA, 0, {"num_layers": 2, "targets": ("q_proj", "up_proj")}),
    ],
)
def test_mlx_lm_computes_the_same(tmp_path, model, bits, options):
    """Float32 logits of up to 10: equal within 1e-4; a wrong scale, layer or target differs by more than 0.1."""
    ours, lora, config, base = make(model, bits, **options)
    save_adapter(tmp_path, lora, config, str(base), {})
    theirs, _ = load_model(base)
    plain = theirs(IDS)
    load_adapters(theirs, str(tmp_path))
    assert mx.abs(ours(IDS) - plain).max().item() > 0.1
    assert mx.abs(ours(IDS) - theirs(IDS)).max().item() < 1e-4


def test_the_configuration(tmp_path):
    _, lora, config, base = make(rank=16, rslora=True, num_layers=2, dropout=0.1)
    save_adapter(tmp_path, lora, config, "some/base", {"components": {"method": "sft"}})
    content, tensors = load_adapter(tmp_path)
    parameters = content["lora_parameters"]
    assert (content["fine_tune_type"], content["num_layers"], content["model"]) == ("lora", 2, "some/base")
    assert (parameters["rank"], parameters["scale"], parameters["dropout"]) == (16, 5.0, 0.1)
    assert "self_attn.q_proj" in parameters["keys"] and "mlp.down_proj" in parameters["keys"]
    ours = content["mlxlab"]
    assert (ours["ranks"], ours["scales"], ours["rslora"]) == (lora.ranks, lora.scales, True)
    assert (ours["rank_scaling"], ours["components"]) == ("constant", {"method": "sft"})
    assert tensors.keys() == lora.params().keys() and {v.dtype for v in tensors.values()} == {mx.float32}


def test_unequal_scales_say_that_mlx_lm_cannot_load_them(tmp_path):
    _, lora, config, base = make()
    next(iter(lora.modules.values())).scale = 3.0
    save_adapter(tmp_path, lora, config, str(base), {})
    content, _ = load_adapter(tmp_path)
    assert content["uniform_ranks"] is False and "mlx-lm cannot load" in content["lora_parameters"]["note"]
    with pytest.raises(KeyError, match="scale"):
        load_adapters(load_model(base)[0], str(tmp_path))


def save(run_folder, lora, config):
    return run_folder.save("best", lambda path: save_adapter(path, lora, config, "base", {}))


def test_a_full_disk_leaves_the_adapter_before_it(run_folder):
    """A real failure inside MLX's writer: the process may not write files of more than 4096 bytes."""
    _, lora, config, _ = make()
    path = save(run_folder, lora, config)
    before = (path / "adapters.safetensors").read_bytes()
    needed = sum(value.nbytes for value in lora.params().values())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(CheckpointError) as caught:
            save(run_folder, make(seed=1)[1], config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sentence = str(caught.value)
    assert f"{path} cannot be written (adapters.safetensors needs {needed} bytes: " in sentence
    assert sentence.endswith("what was there before is unchanged.")
    assert (path / "adapters.safetensors").read_bytes() == before and load_adapter(path)
    assert sorted(p.name for p in run_folder.path.iterdir()) == ["best", "status.json"]


@pytest.mark.parametrize("call", ["mx.save_safetensors", "os.rename"])
def test_a_save_that_stops_half_way_leaves_the_adapter_before_it(run_folder, monkeypatch, call):
    _, lora, config, _ = make()
    path = save(run_folder, lora, config)
    before = (path / "adapters.safetensors").read_bytes()
    rename = os.rename

    def half(file, *_):
        with open(file, "wb") as out:
            out.write(b"half")
        raise RuntimeError("[write] Unable to write")

    def only_aside(source, target):  # the older folder steps aside, the new one cannot take its place
        if str(target).endswith("best") and "-old" not in str(source):
            raise OSError("denied")
        rename(source, target)

    target, attribute = (mx, "save_safetensors") if call.startswith("mx") else (os, "rename")
    monkeypatch.setattr(target, attribute, half if target is mx else only_aside)
    with pytest.raises(CheckpointError, match="best cannot be written .* is unchanged"):
        save(run_folder, make(seed=1)[1], config)
    assert (path / "adapters.safetensors").read_bytes() == before
    assert sorted(p.name for p in run_folder.path.iterdir()) == ["best", "status.json"]


def test_a_checkpoint_continues(tmp_path):
    """Two updates in one go, or with a checkpoint between them: bit-equal."""
    _, lora, config, _ = make(targets=("q_proj",))
    optim = OptimConfig(learning_rate=1e-2, schedule="constant")
    grads = {name: mx.ones_like(value) for name, value in lora.params().items()}
    first = Optimizer(optim, 2)
    lora.update(first.update(lora.params(), grads, 1))
    save_checkpoint(tmp_path, lora, config, "base", first.state(), {"step": 1})
    lora.update(first.update(lora.params(), grads, 2))

    _, again, _, _ = make(targets=("q_proj",), seed=5)
    load_adapter_weights(again, tmp_path)
    second = Optimizer(optim, 2)
    second.load_state(mx.load(str(tmp_path / "optimizer.safetensors")))
    again.update(second.update(again.params(), grads, 2))
    assert same(again, lora)
    assert json.loads((tmp_path / "progress.json").read_text(encoding="utf-8")) == {"step": 1}


def test_saving_over_the_adapter_that_was_read(tmp_path):
    _, lora, config, _ = make(targets=("q_proj",))
    save_adapter(tmp_path, lora, config, "base", {})
    _, again, _, _ = make(targets=("q_proj",), seed=5)
    load_adapter_weights(again, tmp_path)
    _, tensors = load_adapter(tmp_path)
    save_adapter(tmp_path, again, config, "base", {})
    assert same(again, lora)
    (tmp_path / "adapters.safetensors").write_bytes(b"")  # what was read does not need its file any more
    assert all(mx.array_equal(tensors[name], value).item() for name, value in lora.params().items())


def test_what_cannot_be_read(tmp_path):
    _, lora, config, _ = make(targets=("q_proj",))
    save_adapter(tmp_path, lora, config, "base", {})
    weights, options = tmp_path / "adapters.safetensors", tmp_path / "adapter_config.json"
    for content in ("[1]", "{broken"):
        options.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"the adapter in .* cannot be read \(.*; use another adapter"):
            load_adapter(tmp_path)
    options.write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not say its scale, this run has 20.0"):
        load_adapter_weights(lora, tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapter(tmp_path)
    options.unlink()
    with pytest.raises(CheckpointError, match="is not an adapter folder: it has no adapter_config.json"):
        load_adapter(tmp_path)


def test_weights_that_are_not_finite_are_not_loaded(tmp_path):
    _, lora, config, _ = make(targets=("q_proj",))
    save_adapter(tmp_path, lora, config, "base", {})
    _, tensors = load_adapter(tmp_path)
    name = next(iter(tensors))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {**tensors, name: tensors[name] * math.inf})
    before = dict(lora.params())
    with pytest.raises(CheckpointError, match=f"{name} is not finite"):
        load_adapter_weights(lora, tmp_path)
    assert all(value is before[n] for n, value in lora.params().items())


def test_the_old_name_of_a_field_is_named_with_the_new_one(tmp_path):
    """Adapters of early mlx-lm versions: neither an AttributeError nor a default in its place."""
    _, lora, config, base = make(num_layers=2)
    save_adapter(tmp_path, lora, config, str(base), {})
    content = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    content["lora_layers"] = content.pop("num_layers")
    (tmp_path / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="has lora_layers=2, now num_layers: rename the field there"):
        load_adapter_weights(lora, tmp_path)
    content["num_layers"] = content.pop("lora_layers")
    (tmp_path / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    load_adapter_weights(lora, tmp_path)

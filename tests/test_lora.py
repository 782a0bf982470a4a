"""LoRA: ranks, scales, dropout, what is switched off and restored, what is refused."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.lora import LoraConfig, LoRALinear, apply_lora, load_adapter_weights

BLOCKS = ["layers.0", "layers.1", "layers.2"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=True)
        self.down_proj = nn.Linear(64, 16, bias=False)


class Model(nn.Module):
    def __init__(self, bits=()):
        super().__init__()
        self.layers = [Layer() for _ in BLOCKS]
        self.lm_head = nn.Linear(64, 8)
        for number, width in enumerate(bits):
            self.layers[number].q_proj = self.layers[number].q_proj.to_quantized(group_size=32, bits=width)


def make(bits=(), folder=None, **options):
    model = Model(bits)
    options.setdefault("targets", ("q_proj",))
    return model, apply_lora(model, BLOCKS, LoraConfig(**options), seed=0, model_folder=folder)


def test_initial_values():
    """A uniform in +-1/sqrt(in), B zero: the output is the base's, and nothing but A and B is trainable."""
    model, lora = make(rank=4)
    params = lora.params()
    assert {name: value.shape for name, value in params.items()} == {
        f"layers.{i}.q_proj.lora_{leaf}": shape for i in range(3) for leaf, shape in (("a", (64, 4)), ("b", (4, 32)))
    }
    a = params["layers.0.q_proj.lora_a"]
    assert a.dtype == mx.float32 and mx.abs(a).max().item() <= 1 / 8 and mx.abs(a).max().item() > 0.9 / 8
    x = mx.random.normal((3, 64), key=mx.random.key(1))
    layer = model.layers[0].q_proj
    assert mx.array_equal(layer(x), layer.linear(x))
    from mlx.utils import tree_flatten

    assert {name for name, _ in tree_flatten(model.trainable_parameters())} == set(params)


def test_the_update():
    """By hand: A [[1,3],[2,4]], B [[1,2],[0,1]], scale 2, x [1, 1]."""
    linear = nn.Linear(2, 2, bias=False)
    linear.weight = mx.zeros((2, 2))
    layer = LoRALinear(linear, rank=2, scale=2.0, dropout=0.0, key=mx.random.key(0))
    layer.lora_a, layer.lora_b = mx.array([[1.0, 3.0], [2.0, 4.0]]), mx.array([[1.0, 2.0], [0.0, 1.0]])
    assert layer(mx.array([[1.0, 1.0]])).tolist() == [[6.0, 26.0]]


def test_initialization_depends_on_the_seed_only():
    mx.random.seed(1)
    first = make()[1].params()
    mx.random.seed(2)
    second = make()[1].params()
    assert all(mx.array_equal(first[name], second[name]) for name in first)
    other = apply_lora(Model(), BLOCKS, LoraConfig(targets=("q_proj",)), seed=1).params()
    assert not mx.array_equal(first["layers.0.q_proj.lora_a"], other["layers.0.q_proj.lora_a"])
    a = [first[f"layers.{i}.q_proj.lora_a"] for i in range(2)]
    assert not mx.array_equal(*a)


def test_rank_by_bits():
    _, lora = make(bits=(8, 4, 3), rank=8, rank_scaling="by_bits")
    assert list(lora.ranks.values()) == [16, 8, 6]
    assert "rank 6 x 1, rank 8 x 1, rank 16 x 1" in lora.summary()


def test_rank_by_sensitivity(tmp_path):
    layers = {f"layers.{i}.q_proj": {"kl": kl} for i, kl in enumerate((2.0, 1.0, 0.1))}
    (tmp_path / "optiq_metadata.json").write_text(json.dumps({"optimization": {"per_layer": layers}}), encoding="utf-8")
    _, lora = make(folder=tmp_path, rank=8, rank_scaling="by_kl")
    assert list(lora.ranks.values()) == [16, 8, 4]
    with pytest.raises(ConfigError, match="needs sensitivities, and .* has none; use by_bits or constant"):
        make(folder=tmp_path / "elsewhere", rank_scaling="by_kl")
    layers["layers.1.q_proj"] = {"bits": 4}  # no sensitivity and no width: the base rank
    layers["layers.2.q_proj"] = {"kl": 0.0}
    (tmp_path / "optiq_metadata.json").write_text(json.dumps({"per_layer": layers}), encoding="utf-8")
    assert list(make(folder=tmp_path, rank=8, rank_scaling="by_kl")[1].ranks.values()) == [8, 8, 4]  # median 2


def test_rank_by_sensitivities_that_are_all_zero(tmp_path):
    layers = {f"layers.{i}.q_proj": {"kl": 0.0} for i in range(3)}
    (tmp_path / "optiq_metadata.json").write_text(json.dumps({"per_layer": layers}), encoding="utf-8")
    assert list(make(folder=tmp_path, rank=8, rank_scaling="by_kl")[1].ranks.values()) == [8, 8, 8]


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("{broken", r"by_kl cannot read the sensitivities in .*optiq_metadata.json \(.*; repair that file"),
        ("[1]", "by_kl cannot read"),
        ('{"per_layer": {"layers.0.q_proj": {"kl": "high"}}}', "by_kl cannot read"),
        ('{"per_layer": {"layers.0.q_proj": {"kl": -1}}}', "kl of layers.0.q_proj must be >= 0 and finite, got -1.0"),
        ('{"per_layer": {"layers.0.q_proj": {"kl": NaN}}}', "kl of layers.0.q_proj must be >= 0 and finite, got nan"),
        ('{"per_layer": {"blocks.0.q": {"kl": 1}}}', "names other layers .such as blocks.0.q.; use by_bits"),
    ],
)
def test_sensitivities_that_cannot_be_used(tmp_path, content, sentence):
    (tmp_path / "optiq_metadata.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        make(folder=tmp_path, rank_scaling="by_kl")


def test_rslora_divides_by_the_root_of_each_rank():
    _, lora = make(bits=(8, 4), rank=16, rslora=True, rank_scaling="by_bits")
    assert list(lora.scales.values()) == pytest.approx([20 / math.sqrt(32), 5.0, 5.0])


def test_disabled_restores_unequal_scales_after_an_exception():
    model, lora = make(bits=(8, 4), rslora=True, rank_scaling="by_bits")
    before = lora.scales
    lora.update({name: mx.full(value.shape, mx.nan) for name, value in lora.params().items()})  # 0 * nan is nan
    x = mx.ones((1, 64))
    with pytest.raises(KeyError):
        with lora.disabled():
            assert mx.array_equal(model.layers[0].q_proj(x), model.layers[0].q_proj.linear(x))
            raise KeyError
    assert lora.scales == before and len(set(before.values())) == 2


def test_dropout_statistics_and_keys():
    model, lora = make(rank=4, dropout=0.25)
    layer = model.layers[0].q_proj
    layer.linear.weight, layer.linear.bias = mx.zeros((32, 64)), mx.zeros((32,))
    layer.lora_a, layer.lora_b, layer.scale = mx.zeros((64, 4)), mx.zeros((4, 32)), 1.0
    layer.lora_a[:, 0], layer.lora_b[0] = 1.0, 1.0
    x = mx.ones((2000, 64))

    def output(key):
        with lora.bound({name: value for name, value in lora.params().items()}, key):
            return layer(x)[:, 0]  # sum of what was kept, divided by 0.75

    one, same, other = (output(mx.random.key(k)) for k in (1, 1, 2))
    assert mx.array_equal(one, same) and not mx.array_equal(one, other)
    assert one.mean().item() == pytest.approx(64, rel=0.01)
    assert one.var().item() == pytest.approx(64 * 0.25 / 0.75, rel=0.1)
    assert output(None).tolist() == [64.0] * 2000
    compiled = mx.compile(lambda key: output(key))
    assert mx.allclose(compiled(mx.random.key(1)), one) and mx.allclose(compiled(mx.random.key(2)), other)


def test_dropout_repeats_in_recomputation():
    """mx.checkpoint draws the mask again: value and gradient are those without it. Float32, within 1e-6 relative."""
    model, lora = make(rank=4, dropout=0.5)
    lora.update({name: mx.random.normal(p.shape, key=mx.random.key(7)) for name, p in lora.params().items()})
    x = mx.random.normal((5, 64), key=mx.random.key(1))
    params = {name: value for name, value in lora.params().items() if name.startswith("layers.0.")}

    def loss(params, key):
        with lora.bound(params, key):
            return mx.square(model.layers[0].q_proj(x)).sum()

    drawn = lambda params: loss(params, mx.random.key(3))  # captured: mx.checkpoint would differentiate an argument
    value, gradient = mx.value_and_grad(drawn)(params)
    mx.random.seed(11)  # the global generator has no say
    again, repeated = mx.value_and_grad(mx.checkpoint(drawn))(params)
    assert again.item() == pytest.approx(value.item(), rel=1e-6)
    assert all(mx.allclose(repeated[name], gradient[name], rtol=1e-5, atol=1e-4) for name in params)
    assert abs(loss(params, mx.random.key(4)).item() / value.item() - 1) > 1e-3


def test_bound_restores_what_it_found():
    model, lora = make(dropout=0.5)
    layer, before = model.layers[0].q_proj, lora.params()
    zeros = {name: mx.zeros_like(value) for name, value in before.items()}
    with pytest.raises(KeyError):
        with lora.bound(zeros, mx.random.key(0)):
            outer = layer._key
            with lora.bound(zeros, None):
                assert layer._key is None
            assert layer._key is outer and not layer.lora_a.any()
            raise KeyError
    assert layer._key is None and all(value is before[name] for name, value in lora.params().items())


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"scale": 0.0}, "scale must be > 0 and finite, got 0.0"),
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
        ({"num_layers": 0}, "num_layers must be -1 .all. or >= 1, got 0"),
        ({"targets": ()}, "targets must name at least one linear layer"),
        ({"rank_scaling": "by_bit"}, "did you mean 'by_bits'"),
    ],
)
def test_ranges(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LoraConfig(**options)


def test_targets_and_layers():
    assert list(make(num_layers=1, targets=("q_proj", "down_proj"))[1].modules) == [
        "layers.2.down_proj",
        "layers.2.q_proj",
    ]
    with pytest.raises(ConfigError, match="k_proj is the name of no linear layer; .*did you mean 'q_proj'"):
        make(targets=("q_proj", "k_proj"))
    with pytest.raises(ConfigError, match="lora.num_layers=4, but the model has 3 layers"):
        make(num_layers=4)
    with pytest.raises(ConfigError, match="k_proj is the name of no linear layer in the last 1 of 3 layers"):
        make(num_layers=1, targets=("q_proj", "k_proj"))


def test_layers_that_are_not_linear_are_refused():
    from mlx_lm.models.switch_layers import SwitchLinear

    for layer in (SwitchLinear(64, 32, 4, bias=False), nn.Conv1d(64, 32, 3), nn.RMSNorm(64)):
        model = Model()
        model.layers[1].q_proj = layer
        sentence = f"q_proj matches layers.1.q_proj, a {type(layer).__name__}, and only linear layers can have LoRA"
        with pytest.raises(ConfigError, match=sentence):
            apply_lora(model, BLOCKS, LoraConfig(targets=("q_proj",)), seed=0)
        assert isinstance(model.layers[0].q_proj, nn.Linear)  # nothing was replaced


def test_warm_start_names_what_does_not_fit(tmp_path):
    from mlxlab.adapters import save_adapter

    config = LoraConfig(rank=4, targets=("q_proj",))
    model = Model()
    lora = apply_lora(model, [f"{b}" for b in BLOCKS], config, seed=0)
    save_adapter(tmp_path, lora, config, "base", {})
    again = apply_lora(Model(), BLOCKS, config, seed=9)
    load_adapter_weights(again, tmp_path)
    assert all(mx.array_equal(v, lora.params()[n]) for n, v in again.params().items())
    for options, sentence in (
        ({"rank": 2}, r"layers.0.q_proj.lora_a has shape \(64, 4\), this run needs \(64, 2\)"),
        ({"num_layers": 2}, "layers.0.q_proj.lora_a belongs to no layer of this run"),
        ({"targets": ("q_proj", "down_proj")}, "layers.0.down_proj.lora_a is missing"),
        ({"scale": 10.0}, "layers.0.q_proj was trained with scale 20.0, this run has 10.0"),
    ):
        other = apply_lora(Model(), BLOCKS, LoraConfig(**{"rank": 4, "targets": ("q_proj",), **options}), seed=1)
        before = other.params()
        with pytest.raises(CheckpointError, match=sentence):
            load_adapter_weights(other, tmp_path)
        assert all(mx.array_equal(v, before[n]) for n, v in other.params().items())
    with pytest.raises(CheckpointError, match="is not an adapter folder: it has no adapters.safetensors"):
        load_adapter_weights(again, tmp_path / "nowhere")


def test_unequal_ranks_are_refused_by_mlx_lm(tmp_path):
    from mlx_lm.tuner.utils import load_adapters

    from mlxlab.adapters import save_adapter

    config = LoraConfig(targets=("q_proj",), rank_scaling="by_bits")
    lora = apply_lora(Model((8, 4, 4)), BLOCKS, config, seed=0)
    save_adapter(tmp_path, lora, config, "base", {})
    content = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert content["uniform_ranks"] is False and content["mlxlab"]["ranks"] == lora.ranks
    with pytest.raises(KeyError, match="scale"):
        load_adapters(Model((8, 4, 4)), str(tmp_path))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    from mlxlab.adapters import save_adapter

    _, lora = make()
    lora.update({"layers.1.q_proj.lora_b": mx.full((8, 32), mx.nan)})
    with pytest.raises(CheckpointError, match="layers.1.q_proj.lora_b is not finite"):
        save_adapter(tmp_path, lora, LoraConfig(), "base", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["fused", "dequantize", "resident"])
def test_bits_decide_the_rank_however_products_are_computed(policy):
    from mlxlab.models.decoder import Llama
    from mlxlab.models.load import load
    from mlxlab.models.tiny import TinyLlama

    loaded = load(TinyLlama(bits=8).folder(), Llama, "float32", policy)
    paths = [block.path for block in loaded.adapter.blocks()]
    lora = apply_lora(loaded.model, paths, LoraConfig(rank=4, rank_scaling="by_bits"), seed=0)
    assert set(lora.ranks.values()) == {8}

"""From composed configurations to checked objects: every mistake has its sentence, and all are shown at once."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mlxlab.cli import compose_run
from mlxlab.config import RunConfig, build_config
from mlxlab.data import DataConfig
from mlxlab.discovery import load_plugins
from mlxlab.errors import ConfigError
from mlxlab.heads.flash import Flash
from mlxlab.lora import LoraConfig
from mlxlab.memory.backward.checkpoint import Checkpoint
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.backward.segmented import Segmented
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.dpo import Dpo
from mlxlab.methods.orpo import Orpo
from mlxlab.models.pretrained import Pretrained
from mlxlab.models.tiny import TinyLlama
from mlxlab.publish import CONF, defaults_of
from mlxlab.settings import ModelConfig, TrainConfig


def config(*overrides: str) -> RunConfig:
    return compose_run(["model=tiny_llama", *overrides])[0]


def from_dict(**changes):
    """`build_config` of the default configuration with other values at the top, as a file could have them."""
    resolved = config().resolved
    return build_config(OmegaConf.create({**resolved, **changes}), load_plugins())


def problems(make, *arguments, **changes) -> list[str]:
    with pytest.raises(ConfigError) as error:
        make(*arguments, **changes)
    return str(error.value).splitlines()


pytestmark = pytest.mark.usefixtures("elsewhere")


# ----------------------------------------------------------------------------------------------------- what is built
def test_defaults():
    built = config()
    assert built.method == Orpo() and built.head == type(built.head)()
    assert (built.backward, built.layout) == (Plain(), Separate())
    assert built.source == TinyLlama() and built.model == ModelConfig()
    assert built.train == TrainConfig() and built.lora == LoraConfig()
    assert built.optim.learning_rate == Orpo.learning_rate
    assert (built.seed, built.output_dir, built.attention) == (0, "outputs", "auto")


def test_learning_rate_follows_the_method_unless_given():
    assert config("method=dpo").optim.learning_rate == Dpo.learning_rate
    assert config("method=dpo", "optim.learning_rate=1e-5").optim.learning_rate == 1e-5


def test_components_and_resolved():
    built = config("head=flash", "memory=segmented_prefix_shared", "method.weight=0.5")
    assert built.components() == {
        "method": {"name": "orpo", "weight": 0.5, "scope": "full"},
        "head": {"name": "flash", "chunk_tokens": 2048, "tile_vocab": 8192, "form": "auto"},
        "backward": {"name": "segmented", "segment_layers": 2, "granularity": "block"},
        "layout": {"name": "prefix_shared"},
    }
    options = {"segment_layers": 2, "granularity": "block"}
    assert built.resolved["memory"] == {"backward": "segmented", "layout": "prefix_shared", **options}
    assert built.resolved["optim"]["learning_rate"] == 1e-4


def test_resolved_is_a_configuration():
    for overrides in ([], ["model.path=/somewhere"], ["memory=mlp_split", "method=dpo", "head=naive", "seed=7"]):
        built = config(*overrides)
        text = OmegaConf.to_yaml(OmegaConf.create(built.resolved))
        assert build_config(OmegaConf.create(text), load_plugins()) == built


@pytest.mark.parametrize(
    "memory, backward, layout",
    [
        ("none", Plain(), Separate()),
        ("plain", Plain(), Separate()),
        ("checkpoint", Checkpoint(), Separate()),
        ("mlp_split", Checkpoint("half"), Separate()),
        ("segmented", Segmented(), Separate()),
        ("prefix_shared", Plain(), PrefixShared()),
        ("segmented_prefix_shared", Segmented(), PrefixShared()),
        ("[segmented,prefix_shared]", Segmented(), PrefixShared()),
        ("[prefix_shared,mlp_split]", Checkpoint("half"), PrefixShared()),
    ],
)
def test_memory(memory, backward, layout):
    built = config(f"memory={memory}")
    assert (built.backward, built.layout) == (backward, layout)


def test_memory_slots_can_be_set_one_by_one():
    built = config("memory.backward=checkpoint", "+memory.granularity=half", "memory.layout=prefix_shared")
    assert (built.backward, built.layout) == (Checkpoint("half"), PrefixShared())
    assert from_dict(memory={}).backward == Plain()


def test_numbers_in_scientific_notation():
    assert config("optim.learning_rate=1e-5").optim.learning_rate == 1e-5
    assert config("train.iters=1e2").train.iters == 100
    built = from_dict(optim=OmegaConf.create("{learning_rate: 1e-5, warmup: 1e1, weight_decay: 1.0e-1}"))
    assert (built.optim.learning_rate, built.optim.warmup, built.optim.weight_decay) == (1e-5, 10, 0.1)
    assert isinstance(built.optim.warmup, int)


def test_a_path_replaces_the_checkpoint():
    built = config("model.path=/somewhere", "model.dtype=bfloat16")
    assert built.source == Pretrained("/somewhere") and built.model.dtype == "bfloat16"
    assert built.resolved["model"] == {
        "name": "pretrained",
        "path": "/somewhere",
        "dtype": "bfloat16",
        "linear": "auto",
    }
    assert config("model=pretrained", "model.path=a/b").source == Pretrained("a/b")


def test_zero_is_a_value():
    assert config("seed=0").seed == 0
    built = config("optim.warmup=0", "lora.dropout=0", "train.iters=0", "train.clip_norm=0")
    assert (built.optim.warmup, built.lora.dropout, built.train.iters, built.train.clip_norm) == (0, 0.0, 0, 0.0)


def test_length_of_training():
    assert TrainConfig().updates(7) == 7
    assert TrainConfig(accumulate=4).updates(9) == 3
    assert TrainConfig(epochs=1.5).updates(5) == 8
    assert TrainConfig(epochs=2, accumulate=2).updates(5) == 5
    assert TrainConfig(iters=3).updates(1000) == 3
    assert TrainConfig(iters=0).updates(1000) == 0


# --------------------------------------------------------------------------------------------------- every sentence
def conflict(first: str, second: str, slot: str) -> str:
    return f"memory={first} and memory={second} both fill the slot memory.{slot}; choose one of them"


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            "optim.learning_rat=1e-4",
            "optim.learning_rat=1e-4 does not exist; in optim, allowed: betas, eps, final_ratio, learning_rate, "
            "lora_plus_ratio, schedule, warmup, weight_decay; did you mean 'learning_rate'?",
        ),
        (
            "trainn.iters=5",
            "trainn.iters=5 does not exist; in the configuration, allowed: attention, data, head, lora, memory, "
            "method, model, optim, output_dir, seed, train; did you mean 'train'?",
        ),
        ("seed.x=5", "seed.x=5 does not exist; seed is a value, not a mapping"),
        (
            "+lora.rnak=4",
            "lora.rnak=4 is not an option of lora; allowed: dropout, num_layers, rank, rank_scaling, rslora, scale, "
            "targets, warm_start; did you mean 'rank'?",
        ),
        (
            "+trainn.iters=5",
            "trainn={'iters': 5} is not a key of the configuration; allowed: attention, data, head, lora, memory, "
            "method, model, optim, output_dir, seed, train; did you mean 'train'?",
        ),
        (
            "+method.bogus=1",
            "method.bogus=1 is not an option of orpo (from mlxlab); allowed: scope, weight",
        ),
        (
            "+method.beta=1",
            "method.beta=1 is not an option of orpo (from mlxlab); allowed: scope, weight; "
            "it is an option of method=dpo",
        ),
        ("method=orpp", "method=orpp does not exist; allowed: dpo, orpo, sft; did you mean 'orpo'?"),
        ("method.name=orpp", "method=orpp does not exist; allowed: dpo, orpo, sft; did you mean 'orpo'?"),
        (
            "method.weight=abc",
            "Value 'abc' of method.weight cannot be used for orpo (from mlxlab); allowed: number",
        ),
        ("method.weight=-1", "method.orpo (from mlxlab): weight must be >= 0, got -1.0"),
        ("data=jsonl", "data.path is missing; give data.path=..."),
        ("model=pretrained", "model.path is missing; give model.path=..."),
        ("~head", "head is missing; select an option with head=..."),
        ("method=null", "method=null selects nothing; allowed: dpo, orpo, sft"),
        ("head=3", "head=3 selects nothing; allowed: chunked, flash, fused, naive"),
        ("seed=-1", "the configuration: seed must be >= 0 and < 2^32, got -1"),
        ("seed=x", "Value 'x' of seed cannot be used for the configuration; allowed: integer"),
        ("seed=null", "Value null of seed cannot be used for the configuration; allowed: integer"),
        ("attention=flash", "the configuration: attention must be one of auto, fused, blockwise, got 'flash'"),
        ("output_dir=''", "the configuration: output_dir must not be empty; the default is outputs"),
        ("train.batch_size=0", "train: batch_size must be >= 1, got 0"),
        ("train.epochs=0", "train: epochs must be > 0 and finite, got 0.0"),
        ("train.epochs=nan", "train: epochs must be > 0 and finite, got nan"),
        ("train.iters=-1", "train: iters must be >= 0, got -1"),
        ("train.iters=1.5", "Value 1.5 of train.iters cannot be used for train; allowed: integer or null"),
        ("train.clip_norm=-1", "train: clip_norm must be >= 0 (0: no clipping) and finite, got -1.0"),
        ("train.report_every=0", "train: report_every must be >= 1, got 0"),
        ("train.samples=-1", "train: samples must be >= 0, got -1"),
        ("model.dtype=int8", "model: dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ("model.linear=fast", "model: linear must be one of auto, fused, dequantize, resident, got 'fast'"),
        ("lora.dropout=1", "lora: dropout must be >= 0 and < 1, got 1.0"),
        (
            "optim.learning_rate=${oc.env:MLXLAB_TEST_ABSENT}",
            "optim.learning_rate cannot be resolved: KeyError raised while resolving interpolation: "
            "\"Environment variable 'MLXLAB_TEST_ABSENT' not found\"",
        ),
        (
            "memory.backward=segmentd",
            "memory.backward=segmentd does not exist; allowed: checkpoint, plain, segmented; did you mean 'segmented'?",
        ),
        (
            "+memory.granularty=half",
            "memory.granularty=half does not exist; memory.backward=plain and memory.layout=separate are chosen; "
            "allowed: backward, layout",
        ),
        (
            "+memory.granularity=half",
            "memory.granularity=half is an option of memory.backward=checkpoint, memory.backward=segmented, but "
            "memory.backward=plain and memory.layout=separate are chosen",
        ),
        (
            "model.path=/x model.bits=4",
            "model.path=/x replaces the checkpoint of model=tiny_llama, so model.bits=4 would have no effect; "
            "remove one or the other",
        ),
        ("memory=[segmented,checkpoint]", conflict("segmented", "checkpoint", "backward")),
        ("memory=[checkpoint,mlp_split]", conflict("checkpoint", "mlp_split", "backward")),
        ("memory=[segmented,plain]", conflict("segmented", "plain", "backward")),
        ("memory=[prefix_shared,none]", conflict("prefix_shared", "none", "layout")),
        (
            "memory=[none,segmnted]",
            "memory=segmnted does not exist; allowed: checkpoint, mlp_split, none, packed, plain, prefix_shared, "
            "segmented, segmented_prefix_shared, separate; did you mean 'segmented'?",
        ),
        (
            "head=naive,fused",
            "head=naive,fused gives several values; add -m for one run with each, "
            "or write head=[naive,fused] for a list",
        ),
    ],
)
def test_one_sentence(overrides, sentence):
    assert problems(config, *overrides.split(" ")) == [sentence]


def test_length_given_twice():
    assert problems(config, "train.iters=5", "train.epochs=2") == [
        "train: iters=5 and epochs=2.0 both give the length; set one of them to null"
    ]


def test_everything_wrong_at_once():
    assert problems(config, "method=orpp", "optim.learning_rat=1", "trainn.iters=2", "seed=0") == [
        "method=orpp does not exist; allowed: dpo, orpo, sft; did you mean 'orpo'?",
        *problems(config, "optim.learning_rat=1"),
        problems(config, "trainn.iters=5")[0].replace("=5", "=2"),
    ]
    wrong = ["+method.bogus=1", "train.iters=-1", "lora.rank=0", "seed=-1", "data=jsonl", "head.chunk_tokens=0"]
    found = problems(config, *wrong)
    for override in wrong:
        assert problems(config, override)[0] in found
    assert len(found) == len(wrong)


def test_keys_of_files():
    assert problems(from_dict, trainn={"iters": 5})[0].startswith("trainn={'iters': 5} is not a key")
    assert problems(from_dict, method={"name": "orpo", "wieght": 1})[0].endswith("did you mean 'weight'?")
    assert problems(from_dict, method="orpo")[0].startswith("method=orpo must be a mapping of options; select one")
    assert problems(from_dict, method={"weight": 1})[0].startswith("method is not chosen; write method=NAME, one of")
    assert problems(from_dict, head=None) == ["head=None must be a mapping of options; select one with head=..."]


# ------------------------------------------------------------------------------------------- defaults are in one place
def test_files_repeat_the_defaults_of_their_components_exactly():
    registry = load_plugins()
    groups = {"method": ["method"], "head": ["head"], "model": ["source"], "memory": ["backward", "layout"]}
    seen = set()
    for group, axes in groups.items():
        for file in sorted((CONF / group).glob("*.yaml")):
            node = OmegaConf.to_container(OmegaConf.load(file))
            if file.stem == "mlp_split":
                assert node.pop("granularity") == "half"
                node["granularity"] = "block"
            if file.stem in ("random_1b", "random_gemma4"):
                assert "model_type" in node["config"]
                node["config"] = "???"
            slots = {"backward": None, "layout": None} if group == "memory" else {axes[0]: node.pop("name")}
            for slot in slots:
                slots[slot] = slots[slot] or node.pop(slot, None)
            node.pop("defaults", None)
            expected = {}
            for axis, name in slots.items():
                if name is not None:
                    expected |= defaults_of(registry.entry(axis, name).cls)
                    seen.add((axis, name))
            assert node == expected, file
    built_in = {(e.axis, e.name) for e in registry.entries() if e.provider.name == "mlxlab" and e.axis != "family"}
    assert seen == built_in


def test_the_primary_file_repeats_defaults_exactly():
    primary = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    assert primary["model"] == {"path": None, **defaults_of(ModelConfig)}
    assert {"path": "???", **primary["data"]} == defaults_of(DataConfig)
    assert primary["memory"] == {"backward": "plain", "layout": "separate"}
    assert (primary["seed"], primary["output_dir"], primary["attention"]) == (0, "outputs", "auto")


def test_every_option_is_explained():
    """A comment stands before every value of a file."""
    for file in CONF.rglob("*/*.yaml"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("#"), file
        if file.parent.name in ("method", "head", "memory", "model", "data"):
            for before, line in zip(lines, lines[1:]):
                key = line.split(":")[0]
                if line[:1].isalpha() and key not in ("name", "backward", "layout", "defaults"):
                    assert before.startswith("#"), (file, line)


def test_flash_is_what_its_file_says():
    assert config("head=flash", "head.tile_vocab=16").head == Flash(tile_vocab=16)

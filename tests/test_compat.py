"""Problems of all components are collected, once each, with their remedies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlxlab import compat
from mlxlab.errors import CompatError
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import Backward, ModelAdapter, Problem, Setup
from mlxlab.lora import LoraConfig
from mlxlab.memory.backward.checkpoint import Checkpoint
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft


@dataclass(frozen=True)
class Picky(Backward):
    def check(self, setup):
        yield Problem("Picky wants more than one row.", "set train.batch_size=2.")
        yield Problem("Picky wants more than one row.", "set train.batch_size=2.")
        if setup.device == "cpu":
            yield Problem("Picky needs a GPU", "use memory=none")

    def __call__(self, program, params):
        return None


class Bare(ModelAdapter):
    """A family without features."""

    @classmethod
    def problems(cls, model_config):
        if model_config.get("experts"):
            yield Problem(f"experts={model_config['experts']} cannot be trained", "choose a dense checkpoint")


def setup(method=Orpo(), backward=Plain(), layout=Separate(), device="cpu") -> Setup:
    return Setup(method, Naive(), backward, layout, LoraConfig(), batch_size=1, device=device)


def lines(*arguments) -> list[str]:
    with pytest.raises(CompatError) as error:
        compat.check(*arguments)
    return str(error.value).splitlines()


def test_nothing_to_object_to():
    assert compat.problems(setup()) == []
    compat.check(setup(), Bare, {})


def test_one_sentence_and_remedy_for_each_problem():
    assert lines(setup(backward=Picky())) == [
        "Picky wants more than one row; set train.batch_size=2.",
        "Picky needs a GPU; use memory=none.",
    ]
    assert lines(setup(backward=Picky(), device="metal")) == ["Picky wants more than one row; set train.batch_size=2."]


def test_problems_of_all_components_together():
    found = lines(setup(Sft(), Picky(), PrefixShared()))
    assert len(found) == 3
    assert (
        found[2].startswith("memory.layout=prefix_shared shares a prompt") and "use memory.layout=separate" in found[2]
    )


def test_the_family_is_asked_when_it_is_known():
    everything = setup(Orpo(), Checkpoint("half"), PrefixShared())
    compat.check(everything)
    found = lines(everything, Bare, {"experts": 8})
    assert [line.split()[0] for line in found] == [
        "memory.granularity=half",
        "memory.layout=prefix_shared",
        "experts=8",
    ]
    assert found[2] == "experts=8 cannot be trained; choose a dense checkpoint."

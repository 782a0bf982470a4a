"""Registration rules, building from options, and the sentences of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from mlxlab.errors import ConfigError, PluginError
from mlxlab.interfaces import Backward, Head, Layout, Method, ModelAdapter, ModelSource
from mlxlab.registry import Provider, Registry

DEMO = Provider("demo", "1.0")


@dataclass(frozen=True)
class Hinge(Method):
    weight: float = 0.5
    rows: int = 2
    scope: str = "full"
    limit: int | None = None
    steps: list[int] | None = None

    records: ClassVar[str] = "preference"
    branches: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    learning_rate: ClassVar[float] = 1e-5

    def __post_init__(self):
        if self.weight < 0:
            raise ValueError(f"weight must be >= 0, got {self.weight}")

    def spans(self):
        return {}

    def loss(self, scores, reference):
        return None, {}


@dataclass(frozen=True)
class Top(Head):
    chunk_tokens: int = 4

    def __call__(self, hidden, targets, weights):
        return hidden


@dataclass(frozen=True)
class Bottom(Head):
    tile: int = 4

    def __call__(self, hidden, targets, weights):
        return hidden


@dataclass(frozen=True)
class Slow(Backward):
    def __call__(self, program, params):
        return None


@dataclass(frozen=True)
class Flat(Layout):
    def plan(self, batch, spans):
        return None


@dataclass(frozen=True)
class Disk(ModelSource):
    where: str

    def folder(self):
        return None


class Family(ModelAdapter):
    model_types = ("demo2", "demo2_text")
    embed = blocks = run = finish = head_weights = lambda self, *_: None


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.bound(DEMO, "method")("hinge", Hinge)
    return registry


def refused(registry, axes, name, cls) -> str:
    before = registry.entries()
    with pytest.raises(PluginError) as error:
        registry.bound(Provider("other", "2.0"), *axes)(name, cls)
    assert registry.entries() == before
    assert "\n" not in str(error.value)
    return str(error.value)


def built(registry, axis, name, options) -> str:
    with pytest.raises(ConfigError) as error:
        registry.build(axis, name, options)
    return str(error.value)


# ------------------------------------------------------------------------------------------------------- registration
def test_base_class_decides_the_axis(registry):
    registry.bound(DEMO, "backward", "layout")("slow", Slow)
    registry.bound(DEMO, "backward", "layout")("flat", Flat)
    registry.bound(DEMO, "family", "source")("disk", Disk)
    registry.bound(DEMO, "family", "source")("demo2", Family)
    assert [(e.axis, e.name) for e in registry.entries()] == [
        ("method", "hinge"),
        ("backward", "slow"),
        ("layout", "flat"),
        ("family", "demo2"),
        ("source", "disk"),
    ]
    assert registry.entries()[0].provider == DEMO


def test_instance_instead_of_class(registry):
    message = refused(registry, ["method"], "other", Hinge())
    assert "an instance of Hinge; have you forgotten to remove the () after Hinge?" in message


def test_no_class(registry):
    assert "takes a subclass of mlxlab.Method, got an instance of str" in refused(
        registry, ["method"], "other", "Hinge"
    )


def test_wrong_base_class(registry):
    message = refused(registry, ["backward", "layout"], "other", Hinge)
    assert message == (
        "other: register('other', Hinge) takes a subclass of mlxlab.Backward or mlxlab.Layout; Hinge is none."
    )


def test_taken_name_names_both_providers(registry):
    message = refused(registry, ["method"], "hinge", Hinge)
    assert message.startswith("other: register('hinge', Hinge)") and "already provided by demo" in message


def test_slots_of_memory_share_their_names(registry):
    registry.bound(DEMO, "backward", "layout")("same", Slow)
    assert "backward 'same' is already provided by demo" in refused(registry, ["backward", "layout"], "same", Flat)


def test_dataclass_must_be_frozen_and_its_own(registry):
    @dataclass(frozen=True)
    class Base(Top):
        pass

    class Undecorated(Top):
        pass

    assert "must be a frozen dataclass" in refused(registry, ["head"], "other", Undecorated)
    registry.bound(DEMO, "head")("fine", Base)


def test_abstract_class(registry):
    @dataclass(frozen=True)
    class Unfinished(Head):
        pass

    assert "Unfinished does not define __call__" in refused(registry, ["head"], "other", Unfinished)


@pytest.mark.parametrize("name", ["Hinge", "1st", "a-b", "", "a.b", "_a", None])
def test_names(registry, name):
    assert "a name has the form [a-z][a-z0-9_]*" in refused(registry, ["method"], name, Hinge)


def test_option_that_no_file_can_hold(registry):
    @dataclass(frozen=True)
    class Odd(Top):
        model: object = lambda: None

    assert "an option of Odd cannot be written in a configuration file" in refused(registry, ["head"], "odd", Odd)


def test_reserved_options(registry):
    @dataclass(frozen=True)
    class Named(Top):
        name: str = "x"

    @dataclass(frozen=True)
    class Layered(Slow):
        layout: str = "x"

    assert "option name of Named is reserved" in refused(registry, ["head"], "named", Named)
    assert "option layout of Layered is reserved" in refused(registry, ["backward", "layout"], "layered", Layered)


@pytest.mark.parametrize("attribute", ["records", "branches", "learning_rate"])
def test_method_without_a_class_attribute(registry, attribute):
    body = {"records": "completion", "branches": ("completion",), "learning_rate": 1e-4, "__annotations__": {}}
    del body[attribute]
    functions = {"spans": lambda self: {}, "loss": lambda self, scores, reference: None}
    cls = dataclass(frozen=True)(type("Half", (Method,), {**body, **functions}))
    assert f"Half.{attribute} must" in refused(registry, ["method"], "half", cls)


def test_restore_forgets_what_came_after_the_snapshot(registry):
    before = registry.snapshot()
    registry.bound(DEMO, "head")("top", Top)
    registry.restore(before)
    assert [e.name for e in registry.entries()] == ["hinge"]
    registry.bound(DEMO, "head")("top", Top)


# --------------------------------------------------------------------------------------------------------- building
def test_build(registry):
    options = {"weight": 1, "rows": 1e2, "limit": None, "steps": [1, 2]}
    component = registry.build("method", "hinge", options)
    assert component == Hinge(weight=1.0, rows=100, steps=[1, 2])
    assert isinstance(component.weight, float) and isinstance(component.rows, int)


def test_unknown_name(registry):
    message = built(registry, "method", "hing", {})
    assert message == "method=hing does not exist; allowed: hinge; did you mean 'hinge'?"


def test_unknown_option(registry):
    assert built(registry, "method", "hinge", {"wieght": 3}) == (
        "method.wieght=3 is not an option of hinge (from demo); "
        "allowed: limit, rows, scope, steps, weight; did you mean 'weight'?"
    )


def test_unknown_option_that_another_component_has(registry):
    registry.bound(DEMO, "head")("top", Top)
    registry.bound(DEMO, "head")("bottom", Bottom)
    assert built(registry, "head", "bottom", {"chunk_tokens": 3}).endswith("; it is an option of head=top")


def test_errors_name_plugins_that_failed(registry):
    registry.failures.append("plugin broken is not loaded: no module x.")
    registry.plugins.append(DEMO)
    for message in (built(registry, "method", "mine", {}), built(registry, "method", "hinge", {"mine": 1})):
        assert "not loaded: plugin broken is not loaded: no module x." in message
    assert "plugins found: demo 1.0" in built(registry, "method", "mine", {})


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("weight", "abc", "Value 'abc' of method.weight cannot be used for hinge (from demo); allowed: number"),
        ("weight", None, "Value null of method.weight cannot be used for hinge (from demo); allowed: number"),
        ("weight", True, "Value True of method.weight cannot be used for hinge (from demo); allowed: number"),
        ("rows", 1.5, "Value 1.5 of method.rows cannot be used for hinge (from demo); allowed: integer"),
        ("limit", "x", "Value 'x' of method.limit cannot be used for hinge (from demo); allowed: integer or null"),
        ("scope", [1], "Value [1] of method.scope cannot be used for hinge (from demo); allowed: text"),
        (
            "steps",
            ["a"],
            "Value ['a'] of method.steps cannot be used for hinge (from demo); allowed: list of integer or null",
        ),
        ("weight", -1, "method.hinge (from demo): weight must be >= 0, got -1.0"),
    ],
)
def test_bad_values(registry, option, value, sentence):
    assert built(registry, "method", "hinge", {option: value}) == sentence


def test_all_problems_at_once(registry):
    lines = built(registry, "method", "hinge", {"weight": "a", "rows": "b", "c": 1}).splitlines()
    assert [line.split()[0 if line.startswith("method") else 3] for line in lines] == [
        "method.weight",
        "method.rows",
        "method.c=1",
    ]


def test_required_option(registry):
    registry.bound(DEMO, "family", "source")("disk", Disk)
    assert built(registry, "source", "disk", {}) == "model.where is missing; give model.where=..."


def test_family_for(registry):
    registry.bound(DEMO, "family", "source")("demo2", Family)
    assert registry.family_for("demo2_text") is Family
    with pytest.raises(
        ConfigError, match=r"model_type 'demo3' has no adapter; allowed: demo2, demo2_text; did you mean"
    ):
        registry.family_for("demo3")
    with pytest.raises(ConfigError, match=r"write plugins/foo_bar.py \(README, \"Add a model family\"\)"):
        registry.family_for("foo-bar")

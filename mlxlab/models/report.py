"""`python -m mlxlab models`: the model families, and which memory options each refuses, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

from mlxlab.errors import ConfigError
from mlxlab.interfaces import Component, ModelAdapter, Setup
from mlxlab.registry import Registry, options_of

SLOTS = {"backward": "plain", "layout": "separate"}


@dataclass(frozen=True)
class Support:
    """One family: its name, its class, and option of `memory` -> why it is refused."""

    name: str
    family: type[ModelAdapter]
    refused: Mapping[str, str]

    @property
    def about(self) -> str:
        """The first line of the class's docstring."""
        return (self.family.__doc__ or "").strip().split("\n")[0].rstrip(".")


def main(arguments: Sequence[str]) -> int:
    """Print the table, as Markdown with --markdown."""
    from mlxlab.discovery import load_plugins

    if list(arguments) not in ([], ["--markdown"]):
        raise ConfigError(f"mlxlab models takes --markdown or nothing, got {' '.join(arguments)}.")
    rows = support(load_plugins())
    if arguments:
        print(markdown(rows))
    else:
        _print(rows)
    return 0


def support(registry: Registry) -> list[Support]:
    """All registered families; every memory option is asked whether it can work with them."""
    options = dict(_memory_options(registry))
    method, head = (registry.build(axis, name, {}) for axis, name in (("method", "dpo"), ("head", "naive")))
    slots = {axis: registry.build(axis, name, {}) for axis, name in SLOTS.items()}

    def problems(component: Component, family: type[ModelAdapter] | None) -> list:
        setup = Setup(method, head, slots["backward"], slots["layout"], None, 1, "cpu", family)
        return list(component.check(setup))

    rows = []
    for entry in registry.entries():
        if entry.axis == "family":
            refused = {}
            for option, component in options.items():
                usual = problems(component, None)
                if found := [p for p in problems(component, entry.cls) if p not in usual]:
                    refused[option] = _reason(entry.cls, found[0].sentence)
            rows.append(Support(entry.name, entry.cls, refused))
    return rows


def markdown(rows: Sequence[Support]) -> str:
    """The table of the README."""
    lines = ["| family | `model_type` | what it is | refused `memory`, and why |", "|---|---|---|---|"]
    for row in rows:
        types = ", ".join(f"`{name}`" for name in row.family.model_types)
        refused = "; ".join(f"`{option}`: {reason}" for option, reason in row.refused.items())
        lines.append(f"| {row.name} | {types} | {row.about} | {refused} |")
    return "\n".join(lines)


def _print(rows: Sequence[Support]) -> None:
    from rich.table import Table
    from rich.text import Text

    from mlxlab.table import console

    table = Table("family", "model_type", "what it is", "LoRA by default", "refused, and why", show_lines=True)
    for row in rows:
        refused = "\n".join(f"memory={option}: {reason}" for option, reason in row.refused.items())
        cells = (row.name, "\n".join(row.family.model_types), row.about, ", ".join(row.family.lora_targets), refused)
        table.add_row(*[Text(cell, overflow="fold") for cell in cells])
    console().print(table)


def _memory_options(registry: Registry) -> Iterator[tuple[str, Component]]:
    """Option of `memory` -> its component: the files of the group that fill one slot, then what has no file."""
    from omegaconf import OmegaConf

    from mlxlab.publish import CONF

    seen = set()
    for file in sorted((CONF / "memory").glob("*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(file))
        chosen = [axis for axis, default in SLOTS.items() if node.get(axis, default) != default]
        for axis in chosen:
            allowed = options_of(registry.entry(axis, node[axis]).cls)
            seen.add((axis, node[axis]))
            yield file.stem, registry.build(axis, node[axis], {k: v for k, v in node.items() if k in allowed})
    for entry in registry.entries():
        if entry.axis in SLOTS and (entry.axis, entry.name) not in seen:
            yield entry.name, registry.build(entry.axis, entry.name, {})


def _reason(family: type[ModelAdapter], sentence: str) -> str:
    return next((reason for feature, reason in family.lacks.items() if feature in sentence), sentence)

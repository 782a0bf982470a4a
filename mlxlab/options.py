"""From a node of the configuration to a checked dataclass, with errors that a reader can act on."""

from __future__ import annotations

import dataclasses
import types
import typing
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlxlab.errors import ConfigError, nearest

T = TypeVar("T")


class Problems:
    """Collects sentences, so that a user sees all of them at once: one a line."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keeps the sentences of a ConfigError and goes on after the block."""
        try:
            yield
        except ConfigError as error:
            for sentence in str(error).splitlines():
                self.add(sentence)

    def raise_if_any(self) -> None:
        if self.sentences:
            raise ConfigError("\n".join(self.sentences))


def convert(
    cls: type[T],
    options: Mapping[str, Any],
    node: str,
    label: str = "",
    hint: Callable[[str], str] = lambda option: "",
) -> T:
    """An instance of the dataclass `cls` from plain values.

    Args:
        options: option -> value, without interpolations.
        node: where the options stand in the configuration ("method"; "" is the top).
        label: what has the options, for messages ("orpo (from mlxlab)").
        hint: more to say about an option that `cls` does not have.

    Raises:
        ConfigError: unknown options, missing options, wrong types, values out of range; one sentence each.
    """
    prefix = f"{node}." if node else ""
    label = label or node or "the configuration"
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, None)  # a frozen dataclass makes a read-only node
    problems = Problems()
    lists: dict[str, tuple] = {}  # of dataclasses, which OmegaConf does not make of plain mappings
    for option, value in options.items():
        key = f"{prefix}{option}"
        item = typing.get_args(hints[option])[0] if option in fields and typing.get_args(hints[option]) else None
        if dataclasses.is_dataclass(item) and isinstance(value, list) and all(isinstance(v, Mapping) for v in value):
            with problems.collect():
                lists[option] = tuple(convert(item, v, f"{key}[{number}]") for number, v in enumerate(value))
            continue
        if option not in fields:
            problems.add(f"{key}={value} is not an option of {label}; {nearest(option, fields)}{hint(str(option))}")
            continue
        try:
            schema[option] = _whole(value, hints[option])
        except OmegaConfBaseException:
            given = "null" if value is None else repr(value)
            problems.add(f"Value {given} of {key} cannot be used for {label}; allowed: {_type_name(hints[option])}")
    for option, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and option not in options:
            problems.add(f"{prefix}{option} is missing; give {prefix}{option}=...")
    problems.raise_if_any()
    try:
        if lists:
            return cls(**{**OmegaConf.to_container(schema), **lists})
        built = OmegaConf.to_object(schema)
        # OmegaConf has lists only
        tuples = [name for name, hint in hints.items() if name in fields and typing.get_origin(hint) is tuple]
        return dataclasses.replace(built, **{name: tuple(getattr(built, name)) for name in tuples}) if tuples else built
    except ValueError as error:
        location = f"{node}.{label}" if node and label != node else label
        raise ConfigError(f"{location}: {' '.join(str(error).split())}") from error


def plain(value: Any) -> Any:
    """Dataclasses, tuples, paths and enums as what YAML and JSON can hold."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


def _whole(value: Any, hint: Any) -> Any:
    """1e2 is a float in YAML; where an integer is wanted it means 100."""
    wants_integer = int in _alternatives(hint) and float not in _alternatives(hint)
    return int(value) if wants_integer and isinstance(value, float) and value.is_integer() else value


def _alternatives(hint: Any) -> tuple:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _type_name(hint: Any) -> str:
    """How a type is called in a message: "integer", "number or null", "list of text"."""
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    parts = []
    for part in _alternatives(hint):
        arguments = typing.get_args(part)
        if typing.get_origin(part) in (list, tuple) and arguments:
            parts.append(f"list of {_type_name(arguments[0])}")
        else:
            parts.append(names.get(part) or getattr(part, "__name__", str(part)))
    return " or ".join(parts)

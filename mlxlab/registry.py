"""Names of components: the class behind `method=orpo`, who provided it, and how its options become an object."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, Callable, Iterable, Mapping, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlxlab.errors import ConfigError, PluginError, nearest
from mlxlab.interfaces import Backward, Component, Head, Layout, Method, ModelAdapter, ModelSource
from mlxlab.options import convert

AXES: dict[str, type] = {
    "method": Method,
    "head": Head,
    "backward": Backward,
    "layout": Layout,
    "family": ModelAdapter,
    "source": ModelSource,
}
# The key that selects a component, and the node that holds its options.
SELECTORS = {
    "method": ("method", "method"),
    "head": ("head", "head"),
    "backward": ("memory.backward", "memory"),
    "layout": ("memory.layout", "memory"),
    "source": ("model", "model"),
}
# Options of a node that belong to every component in it, so that no component may define them.
RESERVED = {"backward": {"backward", "layout"}, "layout": {"backward", "layout"}, "source": {"dtype", "linear"}}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Provider(NamedTuple):
    """Who registers: the name of a distribution or file, and its version ("" for a file)."""

    name: str
    version: str = ""


class Entry(NamedTuple):
    """One registered component; `entries()` are the rows of `mlxlab plugins`."""

    axis: str
    name: str
    cls: type
    provider: Provider


class Registry:
    """Components by axis and name, and what is known of the plugins that did not load.

    Attributes:
        failures: one sentence for each plugin that was not loaded.
        plugins: providers that are neither built in nor failed.
        config_dirs: (provider, folder) of the configuration folders of plugins.
        hooks: the pluggy relay through which observers are called, or None.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        self.failures: list[str] = []
        self.plugins: list[Provider] = []
        self.config_dirs: list[tuple[Provider, Any]] = []
        self.hooks: Any = None

    # ------------------------------------------------------------------------------------------------ registration
    def bound(self, provider: Provider, *axes: str) -> Callable[[str, type], None]:
        """The `register(name, cls)` that a hook of `provider` gets; the base class of `cls` chooses among `axes`."""

        def register(name: str, cls: type) -> None:
            self._register(provider, axes, name, cls)

        return register

    def _register(self, provider: Provider, axes: Iterable[str], name: str, cls: type) -> None:
        bases = " or ".join(f"mlxlab.{AXES[axis].__name__}" for axis in axes)
        what = f"{provider.name}: register({name!r}, {getattr(cls, '__name__', repr(cls))})"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{what}: a name has the form [a-z][a-z0-9_]*, such as 'my_method'.")
        if not inspect.isclass(cls):
            kind = type(cls).__name__
            remedy = f"have you forgotten to remove the () after {kind}?" if dataclasses.is_dataclass(cls) else ""
            raise PluginError(f"{what} takes a subclass of {bases}, got an instance of {kind}; {remedy}".rstrip("; "))
        axis = next((axis for axis in axes if issubclass(cls, AXES[axis])), None)
        if axis is None:
            raise PluginError(f"{what} takes a subclass of {bases}; {cls.__name__} is none.")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise PluginError(f"{what}: {cls.__name__} does not define {missing}.")
        _check_class(what, axis, cls)
        # the slots of memory are options of one config group, so they share their names
        for other in ("backward", "layout") if axis in ("backward", "layout") else (axis,):
            if taken := self._entries.get((other, name)):
                raise PluginError(
                    f"{what}: {other} {name!r} is already provided by {taken.provider.name}; choose another name."
                )
        self._entries[axis, name] = Entry(axis, name, cls, provider)

    def snapshot(self) -> tuple:
        """State to go back to with `restore` when a plugin turns out to be broken."""
        return dict(self._entries), list(self.config_dirs)

    def restore(self, snapshot: tuple) -> None:
        self._entries, self.config_dirs = dict(snapshot[0]), list(snapshot[1])

    # ----------------------------------------------------------------------------------------------------- reading
    def entries(self) -> list[Entry]:
        """All components, by axis in the order of `AXES`, then by name."""
        order = list(AXES)
        return sorted(self._entries.values(), key=lambda entry: (order.index(entry.axis), entry.name))

    def names(self, axis: str) -> list[str]:
        return sorted(name for a, name in self._entries if a == axis)

    def entry(self, axis: str, name: Any) -> Entry:
        """The entry behind a name; ConfigError with the nearest match if there is none."""
        found = self._entries.get((axis, name))
        if found is None:
            selector = SELECTORS[axis][0]
            raise ConfigError(
                f"{selector}={name} does not exist; {nearest(name, self.names(axis))}{self.plugin_note()}"
            )
        return found

    def owners(self, axes: Iterable[str], option: str) -> list[str]:
        """Names of the components of `axes` that have this option, as `axis=name`."""
        return [
            f"{SELECTORS[entry.axis][0]}={entry.name}"
            for entry in self.entries()
            if entry.axis in axes and option in options_of(entry.cls)
        ]

    def build(self, axis: str, name: Any, options: Mapping[str, Any]) -> Component:
        """The component with these options; ConfigError with one sentence per problem."""
        entry = self.entry(axis, name)
        label = f"{name} (from {entry.provider.name})"
        node = SELECTORS[axis][1]
        return convert(entry.cls, options, node, label, lambda option: self._hint(axis, name, option))

    def _hint(self, axis: str, name: str, option: str) -> str:
        owners = [owner for owner in self.owners([axis], option) if not owner.endswith(f"={name}")]
        return (f"; it is an option of {', '.join(owners)}" if owners else "") + self.failure_note()

    def family_for(self, model_type: str) -> type[ModelAdapter]:
        """The adapter class for a `model_type` of config.json."""
        known: dict[str, type] = {}
        for entry in self.entries():
            if entry.axis == "family":
                known.update({model_type: entry.cls for model_type in entry.cls.model_types})
        if model_type not in known:
            raise ConfigError(
                f"model_type {model_type!r} has no adapter; {nearest(model_type, known)} To add a family, write "
                f'plugins/{re.sub("[^a-z0-9]+", "_", str(model_type).lower())}.py (README, "Add a model family").'
                f"{self.failure_note()}"
            )
        return known[model_type]

    def failure_note(self) -> str:
        """The tail of an error sentence that may be caused by a plugin that is not there."""
        return f"; not loaded: {' '.join(self.failures)}" if self.failures else ""

    def plugin_note(self) -> str:
        """The same, with the plugins that were found."""
        found = ", ".join(sorted(f"{p.name} {p.version}".strip() for p in self.plugins))
        return (f"; plugins found: {found}" if found else "") + self.failure_note()


def options_of(cls: type) -> list[str]:
    """Names of the options of a component: its dataclass fields."""
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _check_class(what: str, axis: str, cls: type) -> None:
    if axis == "family":
        if not getattr(cls, "model_types", ()):
            raise PluginError(f"{what}: {cls.__name__}.model_types must name values of model_type in config.json.")
        return
    if "__dataclass_params__" not in vars(cls) or not cls.__dataclass_params__.frozen:
        raise PluginError(
            f"{what}: {cls.__name__} must be a frozen dataclass; decorate it with @dataclass(frozen=True)."
        )
    if taken := RESERVED.get(axis, set()) & set(options_of(cls)):
        raise PluginError(f"{what}: option {', '.join(sorted(taken))} of {cls.__name__} is reserved; rename it.")
    if "name" in options_of(cls):
        raise PluginError(f"{what}: option name of {cls.__name__} is reserved; rename it.")
    try:
        OmegaConf.structured(cls)
    except (OmegaConfBaseException, ValueError, TypeError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise PluginError(f"{what}: an option of {cls.__name__} cannot be written in a configuration file ({reason}).")
    if axis == "method":
        if getattr(cls, "records", None) not in ("completion", "preference"):
            raise PluginError(f"{what}: {cls.__name__}.records must be 'completion' or 'preference'.")
        if not getattr(cls, "branches", ()):
            raise PluginError(f"{what}: {cls.__name__}.branches must name the token sequences of an example.")
        if not isinstance(getattr(cls, "learning_rate", None), (int, float)):
            raise PluginError(f"{what}: {cls.__name__}.learning_rate must be a number, the default peak learning rate.")

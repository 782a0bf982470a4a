"""Finds plugins: built-in packages, installed distributions (entry-point group `mlxlab`), files in `plugins/`.

    MLXLAB_PLUGINS_DIR      folder of plugin files (default: plugins/ where the program is started, if there is one)
    MLXLAB_BLOCK            names of plugins that must not be loaded, separated by commas
    MLXLAB_STRICT_PLUGINS   1: a plugin that cannot be loaded is an error instead of a warning

A plugin that fails is left out completely, is named once, and does not disturb the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

import pluggy

from mlxlab import __version__, hookspecs
from mlxlab.errors import PluginError, nearest
from mlxlab.publish import CONF
from mlxlab.registry import Provider, Registry

BUILT_IN = ("mlxlab.methods", "mlxlab.heads", "mlxlab.memory", "mlxlab.models")
LOCAL_PACKAGE = "mlxlab_local"
AXES_OF_HOOK = {
    "mlxlab_register_methods": ("method",),
    "mlxlab_register_heads": ("head",),
    "mlxlab_register_memory": ("backward", "layout"),
    "mlxlab_register_models": ("family", "source"),
}

log = logging.getLogger("mlxlab")
_loaded: Registry | None = None


@dataclass(frozen=True)
class Candidate:
    """A plugin that may be loaded: its name, who provides it, and how to get the object that carries the hooks."""

    name: str
    provider: Provider
    load: Callable[[], Any]
    aliases: tuple[str, ...] = ()  # other names by which it can be blocked
    built_in: bool = False


def load_plugins() -> Registry:
    """The registry of this process; plugins are looked for at the first call only."""
    global _loaded
    if _loaded is None:
        _loaded = discover()
    return _loaded


def discover(built_in: Sequence[str] = BUILT_IN) -> Registry:
    """A new registry with everything that can be loaded now."""
    registry = Registry()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    registry.hooks = manager.hook
    blocked = {name.strip() for name in os.environ.get("MLXLAB_BLOCK", "").split(",") if name.strip()}
    known: dict[str, Candidate] = {}
    names: set[str] = set()
    for candidate in _candidates(built_in):
        names |= {candidate.name, *candidate.aliases}
        if blocked & {candidate.name, *candidate.aliases}:
            continue
        try:
            if candidate.name in known:
                raise PluginError(
                    f"plugin {candidate.name!r} is already provided by {known[candidate.name].provider.name}"
                )
            _add(manager, registry, candidate)
            known[candidate.name] = candidate
            if not candidate.built_in and candidate.provider not in registry.plugins:
                registry.plugins.append(candidate.provider)
        except PluginError as error:
            if candidate.built_in:
                raise
            registry.failures.append(_failure(candidate, error))
    manager.check_pending()
    warnings = registry.failures + [
        f"MLXLAB_BLOCK={name} blocks nothing; {nearest(name, names)}." for name in sorted(blocked - names)
    ]
    if warnings and _strict():
        raise PluginError("\n".join(warnings))
    for warning in warnings:
        log.warning("warning: %s", warning)
    return registry


def notify(registry: Registry, hook: str, **values: Any) -> None:
    """Tell observers about an event of a run. One that raises is named in a warning; the run goes on."""
    for implementation in getattr(registry.hooks, hook).get_hookimpls():
        try:
            implementation.function(**{name: values[name] for name in implementation.argnames})
        except Exception as error:
            log.warning("warning: plugin %s, %s: %s: %s", implementation.plugin_name, hook, type(error).__name__, error)


# ------------------------------------------------------------------------------------------------------------ sources
def _candidates(built_in: Sequence[str]) -> Iterator[Candidate]:
    for module in built_in:
        provider = Provider("mlxlab", __version__)
        yield Candidate(module, provider, lambda module=module: importlib.import_module(module), built_in=True)
    points = importlib.metadata.entry_points(group=hookspecs.PROJECT)
    # sorted, so that the same one of two equal names wins on every machine
    for point in sorted(points, key=lambda point: (point.name, point.dist.name if point.dist else "")):
        provider = Provider(point.dist.name, point.dist.version) if point.dist else Provider(point.name)
        yield Candidate(point.name, provider, point.load, (provider.name,))
    yield from _local_files()


def _local_files() -> Iterator[Candidate]:
    explicit = os.environ.get("MLXLAB_PLUGINS_DIR")
    folder = Path(explicit or "plugins").expanduser().absolute()
    for module in [name for name in sys.modules if name.split(".")[0] == LOCAL_PACKAGE]:
        del sys.modules[module]
    if not folder.is_dir():
        if explicit:
            raise PluginError(f"MLXLAB_PLUGINS_DIR={explicit} is not a folder; create it, or unset the variable.")
        return
    # a package whose path is the folder: files import one another as `from mlxlab_local._shared import x`
    package = types.ModuleType(LOCAL_PACKAGE, "Plugin files of this folder.")
    package.__path__ = [str(folder)]
    sys.modules[LOCAL_PACKAGE] = package
    importlib.invalidate_caches()
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith("_"):
            name = f"{LOCAL_PACKAGE}.{file.stem}"
            load = lambda name=name: importlib.import_module(name)
            yield Candidate(name, Provider(f"{folder.name}/{file.name}"), load, (file.stem,))


# ------------------------------------------------------------------------------------------------------ one plugin
def _add(manager: pluggy.PluginManager, registry: Registry, candidate: Candidate) -> None:
    """Load a plugin and let it register; everything is undone when any part of that fails."""
    before = registry.snapshot()
    try:
        plugin = _quarantined("import", candidate.load)
        _check(plugin)
        try:
            manager.register(plugin, candidate.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(" ".join(str(error).split())) from error
        except ValueError as error:
            raise PluginError(f"the same module is already loaded as plugin {manager.get_name(plugin)!r}") from error
        _check_hooks(manager, plugin)
        for hook, axes in AXES_OF_HOOK.items():
            for function in _implementations(manager, plugin, hook):
                _quarantined(hook, function, register=registry.bound(candidate.provider, *axes))
        for function in _implementations(manager, plugin, "mlxlab_config_dirs"):
            answer = _quarantined("mlxlab_config_dirs", function)
            _add_config_dirs(registry, candidate.provider, answer)
    except PluginError:
        registry.restore(before)
        if manager.get_plugin(candidate.name) is not None:
            manager.unregister(name=candidate.name)
        raise


def _quarantined(where: str, function: Callable, **arguments: Any) -> Any:
    """Call foreign code; whatever it raises becomes a PluginError. SystemExit too: some modules call exit()."""
    try:
        return function(**arguments)
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        message = " ".join(str(error).split())
        raise PluginError(f"{where} failed with {type(error).__name__}: {message}") from error


def _check(plugin: Any) -> None:
    if inspect.isclass(plugin):
        raise PluginError(f"it is the class {plugin.__name__}; have you forgotten the () after its name?")
    version = getattr(plugin, "MLXLAB_API", hookspecs.API_VERSION)
    if version != hookspecs.API_VERSION:
        raise PluginError(
            f"it was written for plugin interface {version} (MLXLAB_API), this mlxlab has {hookspecs.API_VERSION}; "
            "update the plugin or mlxlab"
        )


def _check_hooks(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Refuse what pluggy accepts silently: unknown or undecorated hooks, wrappers, and no hook at all."""
    known = [name for name in vars(hookspecs) if name.startswith("mlxlab_")]
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            raise PluginError(f"unknown hook {caller.name!r}; {nearest(caller.name, known)}")
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin and (implementation.wrapper or implementation.hookwrapper):
                raise PluginError(
                    f"hook {caller.name!r} is a wrapper, which mlxlab never calls; write a plain function"
                )
    marker = f"{hookspecs.PROJECT}_impl"
    for name, value in inspect.getmembers(plugin, inspect.isroutine):
        if name.startswith("mlxlab_") and getattr(value, marker, None) is None:
            raise PluginError(f"function {name} is not marked; decorate it with @mlxlab.hookimpl")
    if not callers:
        raise PluginError(
            "it implements no hook; decorate a function such as mlxlab_register_methods(register) with "
            "@mlxlab.hookimpl, or begin the name of a helper file with _"
        )


def _implementations(manager: pluggy.PluginManager, plugin: Any, hook: str) -> Iterable[Callable]:
    """The hook functions of one plugin, each accepting the arguments of the specification by keyword."""
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin is plugin:
            # an implementation may take fewer arguments than the specification has
            yield lambda i=implementation, **values: i.function(**{name: values[name] for name in i.argnames})


def _add_config_dirs(registry: Registry, provider: Provider, answer: Any) -> None:
    for path in answer if isinstance(answer, (list, tuple)) else [answer] if answer is not None else []:
        folder = Path(path)
        if not folder.is_absolute() or not folder.is_dir():
            raise PluginError(
                f"mlxlab_config_dirs gives {str(path)!r}, which is not an absolute path of a folder; "
                "use Path(__file__).parent / 'conf', and ship its YAML files as package data"
            )
        for file in folder.rglob("*.yaml"):
            option = file.relative_to(folder)
            for owner, other in [(Provider("mlxlab"), CONF), *registry.config_dirs]:
                if (other / option).exists() and other != folder:
                    raise PluginError(f"{file} would never be used: {owner.name} has {other / option}; rename it")
        registry.config_dirs.append((provider, folder))


def _failure(candidate: Candidate, error: PluginError) -> str:
    who = " ".join(filter(None, candidate.provider))
    name = candidate.aliases[0] if candidate.name.startswith(LOCAL_PACKAGE) else candidate.name
    label = name if candidate.provider.name == name else f"{name} ({who})"
    reason = str(error).rstrip(".")
    return f"plugin {label} is not loaded: {reason}. Mend or remove it, or set MLXLAB_BLOCK={name}."


def _strict() -> bool:
    value = os.environ.get("MLXLAB_STRICT_PLUGINS", "0")
    if value not in ("", "0", "1"):
        raise PluginError(f"MLXLAB_STRICT_PLUGINS={value} is not understood; allowed: 0, 1.")
    return value == "1"

"""Hands components and the configuration folders of plugins to Hydra. Call `publish` before Hydra composes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mlxlab.lora import LoraConfig
from mlxlab.optim import OptimConfig
from mlxlab.registry import Provider, Registry
from mlxlab.settings import TrainConfig

_PACKAGE = Path(__file__).resolve().parent
# in a wheel conf/ lies inside the package, in a checkout beside it
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"

_published: list[tuple[str, str]] = []
_config_dirs: list[tuple[Provider, Path]] = []


class PluginConfigDirs(SearchPathPlugin):
    """Puts the folders of plugins behind mlxlab's own, so that a plugin adds options and replaces none."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, folder in _config_dirs:
            search_path.append(provider=provider.name, path=f"file://{folder}")


def publish(registry: Registry, extra_dirs: Iterable[Path] = ()) -> None:
    """Make every component selectable (`method=simpo`), with its defaults as options.

    A component with a YAML file in one of the configuration folders (`extra_dirs` are the user's) keeps that file.
    Repeated calls replace what earlier calls published.
    """
    register_resolvers(registry)
    _config_dirs[:] = registry.config_dirs
    Plugins.instance().register(PluginConfigDirs)
    folders = [CONF, *(folder for _, folder in registry.config_dirs), *extra_dirs]
    store = ConfigStore.instance()
    while _published:
        group, name = _published.pop()
        store.repo.get(group, {}).pop(f"{name}.yaml", None)
    for group, name, node, provider in _nodes(registry):
        # Hydra would take a stored node of the same name for a schema of the file, and warn
        if not any((folder / group / f"{name}.yaml").exists() for folder in folders):
            store.store(group=group, name=name, node=node, provider=provider)
            _published.append((group, name))


def register_resolvers(registry: Registry) -> None:
    """`${default_learning_rate:NAME}`: the peak learning rate that a method suggests."""
    OmegaConf.register_new_resolver(
        "default_learning_rate", lambda name: float(registry.entry("method", name).cls.learning_rate), replace=True
    )


def defaults_of(cls: type) -> dict[str, Any]:
    """Options of a dataclass with their default values; "???" for those that must be given."""
    return OmegaConf.to_container(OmegaConf.structured(cls))


def _nodes(registry: Registry) -> Iterable[tuple[str, str, dict[str, Any], str]]:
    optim = {**defaults_of(OptimConfig), "learning_rate": "${default_learning_rate:${method.name}}"}
    yield "train", "default", defaults_of(TrainConfig), "mlxlab"
    yield "optim", "adamw", optim, "mlxlab"
    yield "lora", "default", defaults_of(LoraConfig), "mlxlab"
    for axis, name, cls, provider in registry.entries():
        if axis in ("method", "head"):
            yield axis, name, {"name": name, **defaults_of(cls)}, provider.name
        elif axis in ("backward", "layout"):
            yield "memory", name, {axis: name, **defaults_of(cls)}, provider.name
        elif axis == "source":
            yield "model", name, {"name": name, **defaults_of(cls)}, provider.name

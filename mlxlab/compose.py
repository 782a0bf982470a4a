"""Composes the configurations of a command line before anything runs, to say in one sentence what is wrong with it.

Hydra composes again when it runs. What this module adds: errors that name key, value, what is allowed and the nearest
match; all jobs of a sweep are checked before the first one starts; two memory options for one slot are refused.
"""

from __future__ import annotations

import argparse
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence, TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mlxlab.config import build_config
from mlxlab.errors import ConfigError, nearest
from mlxlab.options import Problems
from mlxlab.publish import CONF
from mlxlab.registry import Registry

T = TypeVar("T")

CHECKED_JOBS = 200  # of a sweep, about a tenth of a second each; later ones are checked when they run


class Composer:
    """Hydra's configuration of one command line.

    Args:
        arguments: parsed by Hydra's own parser (`overrides`, `config_path`, `config_name`, `config_dir`, ...).
        registry: the components that exist.
    """

    def __init__(self, arguments: argparse.Namespace, registry: Registry):
        setup_globals()
        self.arguments, self.registry = arguments, registry
        self.name = arguments.config_name or "config"
        search_path = create_config_search_path(arguments.config_path or str(CONF))
        if arguments.config_dir:
            folder = f"file://{Path(arguments.config_dir).absolute()}"
            search_path.prepend("command-line", folder, anchor=SearchPathQuery(provider="schema"))
        self.loader = ConfigLoaderImpl(search_path)
        self._fitting: list[str] | None = None  # the overrides of `_master`, once it is composed

    def check(self, build: bool = True) -> None:
        """Raise a ConfigError with all problems of all jobs; `build` also checks names, options and values."""
        problems = Problems()
        for overrides in self.jobs():
            with problems.collect():
                cfg = self.compose(overrides)
                if build:
                    in_job(cfg, lambda job: build_config(job, self.registry))
        problems.raise_if_any()

    def multirun(self) -> bool:
        """Whether there will be several jobs: -m, or `hydra.mode: MULTIRUN` in an experiment."""
        return bool(self.arguments.multirun) or self._master.hydra.mode == RunMode.MULTIRUN

    def jobs(self) -> Iterator[list[str]]:
        """The overrides of each job: one, or those of the basic sweeper."""
        if not self.multirun():
            yield list(self.arguments.overrides)
            return
        hydra = self._master.hydra
        if hydra.sweeper._target_ != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
            return  # such a sweeper chooses values while it runs
        swept = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
        try:
            parsed = OverridesParser.create(self.loader).parse_overrides([*swept, *self.arguments.overrides])
        except OverrideParseException as error:
            raise ConfigError(self._sentence(error, error.override, [])) from error
        for_hydra = [override.input_line for override in parsed if override.is_hydra_override()]
        for_jobs = [override for override in parsed if not override.is_hydra_override()]
        for overrides in BasicSweeper.split_arguments(for_jobs, None)[0][:CHECKED_JOBS]:
            yield [*for_hydra, *overrides]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job; ConfigError with a sentence for each override that does not fit."""
        problems, left = Problems(), list(overrides)
        while True:
            try:
                cfg = self._load(left)
                self._check_model(cfg, left)
                if "memory" not in cfg.hydra.runtime.choices:  # there is no choice where a list was selected
                    self._check_memory(left)
                break
            except (HydraException, ValueError) as error:
                bad = self._culprit(error, left)
                problems.add(self._sentence(error, bad, [o for o in left if o != bad]))
                if bad is None:
                    break
                left.remove(bad)
        problems.raise_if_any()
        return cfg

    def _load(self, overrides: Sequence[str]) -> DictConfig:
        if list(overrides) != self._fitting:
            return self.loader.load_configuration(self.name, list(overrides), RunMode.RUN)
        parsed = OverridesParser.create(self.loader).parse_overrides(list(overrides))
        self.loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        return self._master  # a composition takes a tenth of a second, so it is not repeated

    @cached_property
    def _master(self) -> DictConfig:
        """The configuration without swept values, and without overrides that do not fit (each job reports them)."""
        left = list(self.arguments.overrides)
        while True:
            try:
                cfg = self.loader.load_configuration(self.name, left, RunMode.MULTIRUN, validate_sweep_overrides=False)
                self._fitting = left
                return cfg
            except (HydraException, ValueError) as error:
                bad = self._culprit(error, left)
                if bad is None:
                    raise ConfigError(self._sentence(error, None, [])) from error
                left.remove(bad)

    # --------------------------------------------------------------------------------------------------------- checks
    def _check_model(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        """The group `model` is optional (its default comes from a plugin), so Hydra ignores an unknown name."""
        if any(override.startswith("model=") for override in overrides) and "name" not in cfg.get("model", {}):
            option = cfg.hydra.runtime.choices.get("model")
            allowed = self.loader.get_group_options("model")
            raise ConfigError(f"model={option} does not exist; {nearest(option, allowed)}{self.registry.plugin_note()}")

    def _check_memory(self, overrides: Sequence[str]) -> None:
        """Options of one group merge silently; two that fill the same slot are a mistake."""
        filled: dict[str, str] = {}
        for default in self.loader.compute_defaults_list(self.name, list(overrides), RunMode.RUN).defaults:
            path = default.config_path or ""
            loaded = self.loader.repository.load_config(path) if path.startswith("memory/") else None
            for slot in ("backward", "layout"):
                if loaded is not None and slot in loaded.config:
                    option = path.removeprefix("memory/")
                    if filled.setdefault(slot, option) != option:
                        raise ConfigError(
                            f"memory={filled[slot]} and memory={option} both fill the slot memory.{slot}; "
                            "choose one of them"
                        )

    # ------------------------------------------------------------------------------------------------------ sentences
    def _culprit(self, error: Exception, overrides: Sequence[str]) -> str | None:
        """The override that an error of Hydra is about."""
        if isinstance(error, OverrideParseException):
            return error.override if error.override in overrides else None
        keys = {override: re.split(r"[@=]", override)[0].lstrip("+~") for override in overrides}
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            group, _, option = error.missing_cfg_file.rpartition("/")
            return next((o for o in overrides if keys[o] == group and option in o), None)
        message = str(error)
        if message.startswith("Config group override must be"):
            groups = self.loader.list_groups("")
            odd = re.compile(r"=(null|true|false|[\d.+-]*)$", re.IGNORECASE)
            return next((o for o in overrides if keys[o] in groups and odd.search(o)), None)
        quoted = re.findall(r"'([^']+)'", message)
        return max(
            (o for o in overrides if o in message),
            key=len,
            default=next((o for o in overrides if keys[o] in quoted), None),
        )

    def _sentence(self, error: Exception, bad: str | None, others: Sequence[str]) -> str:
        message = " ".join(str(error).split())
        key, _, value = (bad or "").partition("=")
        if isinstance(error, ConfigError):
            return message
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            group, _, option = error.missing_cfg_file.rpartition("/")
            options = error.options or self.loader.get_group_options(group)
            return (
                f"{group or 'config'}={option} does not exist; {nearest(option, options)}{self.registry.plugin_note()}"
            )
        if isinstance(error, OverrideParseException) and "=" not in error.override:
            return f"{error.override!r} is not of the form key=value; --help lists the keys"
        if message.startswith("Config group override must be") and bad:
            options = self.loader.get_group_options(key)
            return f"{bad} selects nothing; {nearest(value, options)}"
        if message.startswith("Ambiguous value"):
            return f"{bad} gives several values; add -m for one run with each, or write {key}=[{value}] for a list"
        if message.startswith("Could not override"):
            return self._unknown_key(key.lstrip("+~"), value, others)
        cause = (
            f": {str(error.__cause__).splitlines()[0]}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        )
        return f"{bad}: {message}{cause}" if bad and bad not in message else f"{message}{cause}"

    def _unknown_key(self, key: str, value: str, others: Sequence[str]) -> str:
        try:
            node: Any = OmegaConf.to_container(self._load(others))
        except HydraException:
            node = OmegaConf.to_container(self._master)
        where = ""
        for part in key.split("."):
            if not isinstance(node, Mapping):
                return f"{key}={value} does not exist; {where} is a value, not a mapping"
            if part not in node:
                allowed = [name for name in node if where or name != "hydra"]
                return f"{key}={value} does not exist; in {where or 'the configuration'}, {nearest(part, allowed)}"
            node, where = node[part], f"{where}.{part}".lstrip(".")
        return f"{key}={value} cannot be used"


def in_job(cfg: DictConfig, function: Callable[[DictConfig], T]) -> T:
    """Call `function` with the part of a composed configuration that a job sees; `${hydra:...}` has its values then."""
    before = HydraConfig.instance().cfg
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = "."
        for key in ("id", "num"):
            if OmegaConf.is_missing(cfg.hydra.job, key):
                cfg.hydra.job[key] = 0
        HydraConfig.instance().set_config(cfg)
        job = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    try:
        return function(job)
    finally:
        HydraConfig.instance().cfg = before

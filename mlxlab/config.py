"""What one run is made of: a composed configuration becomes checked objects, or one error with every problem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlxlab.errors import ConfigError, nearest
from mlxlab.interfaces import Backward, Head, Layout, Method, ModelSource
from mlxlab.lora import LoraConfig
from mlxlab.optim import OptimConfig
from mlxlab.options import Problems, convert, plain
from mlxlab.registry import Registry, options_of
from mlxlab.settings import ModelConfig, TopConfig, TrainConfig

if TYPE_CHECKING:
    from mlxlab.data import DataConfig

NODES = ("model", "method", "memory", "head", "data", "train", "optim", "lora")
SLOTS = {"backward": "plain", "layout": "separate"}  # of memory, with what stands there if nothing is chosen


@dataclass(frozen=True)
class RunConfig:
    """One run. `resolved` is the complete configuration as plain values; `build_config` accepts it again."""

    source: ModelSource
    model: ModelConfig
    method: Method
    backward: Backward
    layout: Layout
    head: Head
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    lora: LoraConfig
    seed: int
    output_dir: str
    attention: str
    resolved: Mapping[str, Any]

    def components(self) -> dict[str, dict[str, Any]]:
        """Axis -> name and options of the component chosen there."""
        names = {
            "method": self.resolved["method"]["name"],
            "head": self.resolved["head"]["name"],
            "backward": self.resolved["memory"]["backward"],
            "layout": self.resolved["memory"]["layout"],
        }
        return {axis: {"name": name, **plain(getattr(self, axis))} for axis, name in names.items()}


def build_config(cfg: DictConfig, registry: Registry) -> RunConfig:
    """Check a composed configuration and build everything that it names.

    Raises:
        ConfigError: one line per problem: unknown keys, unknown names, missing values, wrong types, bad ranges.
    """
    from mlxlab.data import DataConfig

    problems = Problems()
    _check_top(cfg, problems)
    _check_names(cfg, registry, problems)
    # without names nothing else can be judged: options depend on them
    problems.raise_if_any()

    values = _resolve(cfg, problems)
    built: dict[str, Any] = {}

    def build(key: str, make: Callable[[], Any]) -> None:
        with problems.collect():
            built[key] = make()

    def component(axis: str) -> Any:
        options = dict(values[axis])
        return registry.build(axis, options.pop("name"), options)

    build("model", lambda: _build_model(values["model"], registry))
    build("method", lambda: component("method"))
    build("memory", lambda: _build_memory(values["memory"], registry))
    build("head", lambda: component("head"))
    build("data", lambda: convert(DataConfig, values["data"], "data"))
    build("train", lambda: convert(TrainConfig, values["train"], "train"))
    build("optim", lambda: convert(OptimConfig, values["optim"], "optim"))
    build("lora", lambda: convert(LoraConfig, values["lora"], "lora"))
    build("top", lambda: convert(TopConfig, {key: values[key] for key in values if key not in NODES}, ""))
    problems.raise_if_any()

    model, (source_name, source) = built["model"]
    backward, layout = built["memory"]
    slots = {slot: values["memory"].get(slot, default) for slot, default in SLOTS.items()}
    resolved = {
        "model": {"name": source_name, "path": None, **plain(model), **plain(source)},
        "method": {"name": values["method"]["name"], **plain(built["method"])},
        "memory": {**slots, **plain(backward), **plain(layout)},
        "head": {"name": values["head"]["name"], **plain(built["head"])},
        **{key: plain(built[key]) for key in ("data", "train", "optim", "lora")},
        **plain(built["top"]),
    }
    sections = {key: built[key] for key in ("method", "head", "data", "train", "optim", "lora")}
    return RunConfig(
        source=source,
        model=model,
        backward=backward,
        layout=layout,
        **sections,
        seed=built["top"].seed,
        output_dir=built["top"].output_dir,
        attention=built["top"].attention,
        resolved=resolved,
    )


# -------------------------------------------------------------------------------------------------------------- steps
def _check_top(cfg: DictConfig, problems: Problems) -> None:
    raw = OmegaConf.to_container(cfg)
    allowed = [*NODES, *options_of(TopConfig)]
    for key, value in raw.items():
        if key not in allowed:
            problems.add(f"{key}={value} is not a key of the configuration; {nearest(key, allowed)}")
    for key in NODES:
        if raw.get(key, "???") == "???":
            problems.add(f"{key} is missing; select an option with {key}=...")
        elif not isinstance(raw[key], dict):
            problems.add(f"{key}={raw[key]} must be a mapping of options; select one with {key}=...")
    problems.raise_if_any()


def _check_names(cfg: DictConfig, registry: Registry, problems: Problems) -> None:
    for axis, node in (("method", "method"), ("head", "head"), ("source", "model")):
        with problems.collect():
            name = OmegaConf.select(cfg, f"{node}.name")
            if name is None:
                known = ", ".join(registry.names(axis))
                raise ConfigError(f"{node} is not chosen; write {node}=NAME, one of {known}{registry.plugin_note()}")
            registry.entry(axis, name)
    for axis, default in SLOTS.items():
        with problems.collect():
            registry.entry(axis, OmegaConf.select(cfg, f"memory.{axis}", default=default))


def _resolve(cfg: DictConfig, problems: Problems) -> dict[str, Any]:
    """Plain values without interpolations. Missing ones are reported and left out."""
    try:
        missing = OmegaConf.missing_keys(cfg)
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the configuration'} cannot be resolved: {reason}") from error
    for key in sorted(missing):
        problems.add(f"{key} is missing; give {key}=...")
    present = lambda node: {k: v for k, v in node.items() if v != "???"} if isinstance(node, dict) else node
    return {key: present(node) for key, node in present(values).items()}


def _build_model(node: dict[str, Any], registry: Registry) -> tuple[ModelConfig, tuple[str, ModelSource]]:
    own = options_of(ModelConfig)
    name = node["name"]
    options = {key: value for key, value in node.items() if key not in ("name", *own)}
    cls = registry.entry("source", name).cls
    problems = Problems()
    with problems.collect():
        model = convert(ModelConfig, {key: node[key] for key in own if key in node}, "model")
    with problems.collect():
        path = options.pop("path", None)
        if path is None:  # also the default of models that have no such option
            source = registry.build("source", name, options)
        elif "path" in options_of(cls):
            source = registry.build("source", name, {**options, "path": path})
        else:
            if changed := _changed(registry.build("source", name, options)):
                raise ConfigError(
                    f"model.path={path} replaces the checkpoint of model={name}, so {', '.join(changed)} would have no "
                    "effect; remove one or the other"
                )
            name, source = "pretrained", registry.build("source", "pretrained", {"path": path})
    problems.raise_if_any()
    return model, (name, source)


def _changed(source: ModelSource) -> list[str]:
    """Options of a source that are not at their defaults, as `model.bits=4`."""
    return [
        f"model.{field.name}={getattr(source, field.name)}"
        for field in dataclasses.fields(source)
        if field.default is not dataclasses.MISSING and getattr(source, field.name) != field.default
    ]


def _build_memory(node: dict[str, Any], registry: Registry) -> tuple[Backward, Layout]:
    names = {slot: node.get(slot, default) for slot, default in SLOTS.items()}
    fields = {axis: options_of(registry.entry(axis, name).cls) for axis, name in names.items()}
    options: dict[str, dict[str, Any]] = {"backward": {}, "layout": {}}
    problems = Problems()
    for option, value in node.items():
        if option in names:
            continue
        axes = [axis for axis in names if option in fields[axis]]
        for axis in axes:
            options[axis][option] = value
        if not axes:
            chosen = f"memory.backward={names['backward']} and memory.layout={names['layout']} are chosen"
            if owners := registry.owners(names, option):
                problems.add(f"memory.{option}={value} is an option of {', '.join(owners)}, but {chosen}")
            else:
                allowed = nearest(option, [*names, *fields["backward"], *fields["layout"]])
                problems.add(f"memory.{option}={value} does not exist; {chosen}; {allowed}{registry.failure_note()}")
    built = []
    for axis in names:
        with problems.collect():
            built.append(registry.build(axis, names[axis], options[axis]))
    problems.raise_if_any()
    return built[0], built[1]

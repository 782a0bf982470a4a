"""The hooks a plugin may implement. Every built-in component arrives through the same ones.

    import mlxlab

    @mlxlab.hookimpl
    def mlxlab_register_methods(register):
        register("simpo", SimPO)

`register` is bound to the plugin: duplicates are refused at the call, naming both providers.
"""

from __future__ import annotations

import pluggy

PROJECT = "mlxlab"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

API_VERSION = 1


@hookspec
def mlxlab_register_methods(register):
    """`register(name, cls)` with a subclass of `mlxlab.Method`."""


@hookspec
def mlxlab_register_heads(register):
    """`register(name, cls)` with a subclass of `mlxlab.Head`."""


@hookspec
def mlxlab_register_memory(register):
    """`register(name, cls)` with a subclass of `mlxlab.Backward` or `mlxlab.Layout`; the base class tells the slot."""


@hookspec
def mlxlab_register_models(register):
    """`register(name, cls)` with a subclass of `mlxlab.ModelAdapter` (family) or `mlxlab.ModelSource` (checkpoint)."""


@hookspec
def mlxlab_config_dirs():
    """Path, or list of paths, of folders with options: `<dir>/method/simpo.yaml`, `<dir>/experiment/...`."""


@hookspec
def mlxlab_run_started(run_dir, config, plan):
    """A run begins: its folder, the resolved configuration and plan (plain dictionaries)."""


@hookspec
def mlxlab_record(run_dir, record):
    """One line of metrics.jsonl (train, val, sample, event), as a dictionary."""


@hookspec
def mlxlab_checkpoint_saved(run_dir, path, step):
    """A checkpoint is complete on disk."""


@hookspec
def mlxlab_run_finished(run_dir, status):
    """The run ended: the content of status.json."""

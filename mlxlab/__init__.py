"""A config-driven LoRA fine-tuning lab for MLX.

The names below are what plugins need. They are imported when they are first used, so that `import mlxlab` is cheap
and `mlxlab.backend.prepare` can run before MLX is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "hookimpl": "hookspecs",
    "Component": "interfaces",
    "Method": "interfaces",
    "Head": "interfaces",
    "Backward": "interfaces",
    "Layout": "interfaces",
    "ModelAdapter": "interfaces",
    "ModelSource": "interfaces",
    "Problem": "interfaces",
    "Setup": "interfaces",
    "Scores": "interfaces",
    "TokenLogps": "interfaces",
    "MlxlabError": "errors",
    "ConfigError": "errors",
    "CompatError": "errors",
    "DataError": "errors",
    "PluginError": "errors",
    "CheckpointError": "errors",
    "NonFiniteError": "errors",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'mlxlab' has no attribute {name!r}")
    return getattr(import_module(f"mlxlab.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])

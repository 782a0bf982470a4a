"""Adapter folders that plain mlx-lm loads, and checkpoints to continue from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

import mlx.core as mx

from mlxlab import __version__
from mlxlab.errors import CheckpointError
from mlxlab.lora import Lora, LoraConfig

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


def save_adapter(folder: Path, lora: Lora, config: LoraConfig, base_model: str, extra: Mapping[str, Any]) -> None:
    """Write `adapters.safetensors` and `adapter_config.json` into an existing, empty folder.

    With one rank and scale for all layers, `mlx_lm.generate --adapter-path FOLDER` works. With several it cannot (its
    format has one rank), and the configuration says so in a form that mlx-lm refuses.

    `RunFolder.save` makes the folder, and replaces an older one only when everything is written.

    Raises:
        CheckpointError: a weight is not finite.
        OSError: the weights cannot be written; says how many bytes they need.
    """
    params = lora.params()
    mx.eval(params)
    if bad := [name for name, value in params.items() if not mx.isfinite(value).all().item()]:
        raise CheckpointError(f"{bad[0]} is not finite; the adapter is not saved.")
    ranks, scales = set(lora.ranks.values()), set(lora.scales.values())
    uniform = len(ranks) == len(scales) == 1
    parameters: dict[str, Any] = {"dropout": config.dropout, "keys": sorted({_relative(p) for p in lora.modules})}
    if uniform:
        parameters |= {"rank": ranks.pop(), "scale": scales.pop()}
    else:
        parameters["note"] = (
            "mlx-lm cannot load this adapter: ranks or scales differ between layers (mlxlab.ranks, mlxlab.scales), "
            "and its format has one rank and one scale"
        )
    content = {
        "fine_tune_type": "lora",
        "num_layers": config.num_layers,
        "lora_parameters": parameters,
        "model": base_model,
        "uniform_ranks": uniform,
        "mlxlab": {
            "version": __version__,
            "ranks": lora.ranks,
            "scales": lora.scales,
            "rank_scaling": config.rank_scaling,
            "rslora": config.rslora,
            **extra,
        },
    }
    _write(folder / WEIGHTS, params)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_checkpoint(
    folder: Path,
    lora: Lora,
    config: LoraConfig,
    base_model: str,
    optimizer: Mapping[str, mx.array],
    progress: Mapping[str, Any],
) -> None:
    """An adapter folder with `optimizer.safetensors` and `progress.json` beside it."""
    save_adapter(folder, lora, config, base_model, {})
    _write(folder / "optimizer.safetensors", dict(optimizer))
    (folder / "progress.json").write_text(json.dumps(dict(progress), indent=2) + "\n", encoding="utf-8")


def load_adapter(folder: str | Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Configuration and tensors of an adapter folder; the tensors are read now, not when first used.

    Raises:
        CheckpointError: not an adapter folder, or a file that cannot be read.
    """
    folder = Path(folder).expanduser()
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not an adapter folder: it has no {name}; give the adapter/ of a run.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = mx.load(str(folder / WEIGHTS))
        mx.eval(tensors)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} must hold an object, got {type(config).__name__}")
        if "lora_layers" in config and "num_layers" not in config:  # written by early versions of mlx-lm
            raise ValueError(
                f"{CONFIG} has lora_layers={config['lora_layers']}, now num_layers: rename the field there"
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(
            f"the adapter in {folder} cannot be read ({' '.join(str(error).split())}); use another adapter."
        ) from error
    return config, tensors


def _write(path: Path, tensors: Mapping[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), dict(tensors), {"format": "mlx"})
    except RuntimeError as error:  # MLX's form of an operating system's error, such as a full disk
        needed = sum(value.nbytes for value in tensors.values())
        raise OSError(f"{path.name} needs {needed} bytes: {error}") from error


def _relative(path: str) -> str:
    """`model.layers.3.self_attn.q_proj` -> `self_attn.q_proj`, as mlx-lm names the layers inside a block."""
    parts = path.split(".")
    number = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[number + 1 :])

"""Low-rank adaptation of frozen linear layers (Hu et al., 2021): y = W x + scale * B(A x)."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxlab.errors import CheckpointError, ConfigError, nearest
from mlxlab.interfaces import ModelAdapter, Params
from mlxlab.linear import FrozenMatrix

TARGETS = ModelAdapter.lora_targets
RANK_SCALINGS = ("constant", "by_bits", "by_kl")
LEAVES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class LoraConfig:
    """What is trained.

    Args:
        rank: of the update, >= 1.
        scale: multiplies the update (what other programs call alpha / rank).
        dropout: share of the inputs of the update that is dropped in training, 0 <= dropout < 1.
        targets: linear layers that get an update: last parts of their path, such as "q_proj" or "self_attn.q_proj";
            null for those that the model's family is usually trained with (`python -m mlxlab models` lists them).
        num_layers: only the last so many decoder layers; -1 for all.
        rslora: divide `scale` by the square root of the layer's rank (Kalajdzievski, 2023).
        rank_scaling: "constant"; "by_bits": ceil(rank * bits / 4), more where the base is stored more exactly;
            "by_kl": ceil(rank * kl / median kl), clipped to half and double, with the sensitivities that
            `optiq_metadata.json` in the model folder lists.
        warm_start: folder of an adapter to start from.
    """

    rank: int = 8
    scale: float = 20.0
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    num_layers: int = -1
    rslora: bool = False
    rank_scaling: str = "constant"
    warm_start: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", None if self.targets is None else tuple(self.targets))
        if self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be > 0 and finite, got {self.scale}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be >= 0 and < 1, got {self.dropout}")
        if self.targets == ():
            raise ValueError(f"targets must name at least one linear layer, such as {TARGETS[0]}, or be null")
        if self.num_layers != -1 and self.num_layers < 1:
            raise ValueError(f"num_layers must be -1 (all) or >= 1, got {self.num_layers}")
        if self.rank_scaling not in RANK_SCALINGS:
            raise ValueError(
                f"rank_scaling={self.rank_scaling!r} does not exist; {nearest(self.rank_scaling, RANK_SCALINGS)}"
            )

    def effective_scale(self, rank: int) -> float:
        """The multiplier of an update of this rank."""
        return self.scale / math.sqrt(rank) if self.rslora else self.scale


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank update.

    Args:
        linear: the frozen layer, dense or quantized; input size `in`, output size `out`.
        rank, scale, dropout: of the update.
        key: of the random initial A, uniform in +-1/sqrt(in); B starts at zero.

    `lora_a` is [in, rank], `lora_b` [rank, out], both float32. The update is computed in the dtype of the input.
    """

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float, key: mx.array):
        super().__init__()
        outputs, inputs = FrozenMatrix.of(linear, "fused").shape
        bound = 1 / math.sqrt(inputs)
        self.linear = linear
        self.lora_a = mx.random.uniform(-bound, bound, (inputs, rank), key=key)
        self.lora_b = mx.zeros((rank, outputs))
        self.scale, self.dropout = scale, dropout
        self._key: mx.array | None = None  # of this forward pass; None for no dropout

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        if self.scale == 0:  # off: exactly the base
            return y
        dropped = x
        if self._key is not None:
            # An explicit key: a recomputation must drop what the first computation dropped.
            keep = mx.random.bernoulli(1 - self.dropout, x.shape, key=self._key)
            dropped = x * (keep.astype(x.dtype) / (1 - self.dropout))
        low = (dropped @ self.lora_a.astype(x.dtype)) * self.scale
        return mx.addmm(y, low, self.lora_b.astype(x.dtype))


class Lora:
    """The trainable leaves of a model: `modules` maps the path of each adapted layer to its module, sorted."""

    def __init__(self, modules: Mapping[str, LoRALinear]):
        self.modules = dict(sorted(modules.items()))
        self._number = {path: number for number, path in enumerate(self.modules)}
        self._names = tuple(f"{path}.{leaf}" for path in self.modules for leaf in LEAVES)

    @property
    def ranks(self) -> dict[str, int]:
        return {path: module.lora_a.shape[1] for path, module in self.modules.items()}

    @property
    def scales(self) -> dict[str, float]:
        return {path: module.scale for path, module in self.modules.items()}

    def params(self) -> Params:
        """All leaves by name, "<path>.lora_a" and "<path>.lora_b"."""
        return {f"{path}.{leaf}": module[leaf] for path, module in self.modules.items() for leaf in LEAVES}

    def update(self, params: Mapping[str, mx.array]) -> None:
        """Set leaves by name."""
        for name, value in params.items():
            path, _, leaf = name.rpartition(".")
            self.modules[path][leaf] = value

    def names_under(self, path: str) -> tuple[str, ...]:
        """Names of the leaves inside the module at `path`."""
        return tuple(name for name in self._names if name.startswith(path + "."))

    @contextmanager
    def bound(self, params: Mapping[str, mx.array], key: mx.array | None = None) -> Iterator[None]:
        """Compute with other (possibly traced) leaves, and with dropout if there is a key; restored afterwards.

        The dropout mask of a layer depends on `key` and the layer only, so that it can be drawn again.
        """
        before = {name: self._leaf(name) for name in params}
        keys = {path: self.modules[path]._key for path in (name.rpartition(".")[0] for name in params)}
        try:
            self.update(params)
            split = None if key is None else mx.random.split(key, len(self.modules))
            for path in keys:
                drops = split is not None and self.modules[path].dropout > 0
                self.modules[path]._key = split[self._number[path]] if drops else None
            yield
        finally:
            self.update(before)
            for path, own in keys.items():
                self.modules[path]._key = own

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The frozen base alone; every layer gets its own scale back afterwards."""
        before = self.scales
        try:
            for module in self.modules.values():
                module.scale = 0
            yield
        finally:
            for path, scale in before.items():
                self.modules[path].scale = scale

    def summary(self) -> str:
        """Such as "LoRA on 210 layers: rank 8 x 210; 2.44 M parameters"."""
        counts: dict[int, int] = {}
        for rank in self.ranks.values():
            counts[rank] = counts.get(rank, 0) + 1
        spread = ", ".join(f"rank {rank} x {count}" for rank, count in sorted(counts.items()))
        size = sum(value.size for value in self.params().values())
        return f"LoRA on {len(self.modules)} layers: {spread}; {size / 1e6:.2f} M parameters"

    def _leaf(self, name: str) -> mx.array:
        path, _, leaf = name.rpartition(".")
        return self.modules[path][leaf]


def apply_lora(
    model: nn.Module,
    block_paths: Sequence[str],
    config: LoraConfig,
    seed: int,
    model_folder: Path | None = None,
    family_targets: Sequence[str] = TARGETS,
) -> Lora:
    """Put LoRA into a model, in place, and freeze everything else.

    Args:
        block_paths: paths of the decoder layers, in order ("model.layers.0", ...).
        seed: of the initial values; does not touch MLX's global generator.
        model_folder: where `optiq_metadata.json` is, for rank_scaling="by_kl".
        family_targets: used where `config.targets` is None; those that the chosen layers lack are left out.

    Raises:
        ConfigError: a target that no layer has or that is no linear layer (experts, convolutions), more layers than
            there are, no usable sensitivities for by_kl.
    """
    if config.num_layers > len(block_paths):
        raise ConfigError(
            f"lora.num_layers={config.num_layers}, but the model has {len(block_paths)} layers; use -1 for all."
        )
    chosen = block_paths[-config.num_layers :] if config.num_layers > 0 else block_paths
    inside = {
        path: module for path, module in model.named_modules() if any(path.startswith(block + ".") for block in chosen)
    }
    linears = {path: module for path, module in inside.items() if isinstance(module, (nn.Linear, nn.QuantizedLinear))}
    targets = family_targets if config.targets is None else config.targets
    found = {target: [path for path in inside if f".{path}".endswith(f".{target}")] for target in targets}
    if config.targets is None and any(found.values()):
        found = {target: paths for target, paths in found.items() if paths}
    if unused := [target for target, paths in found.items() if not paths]:
        names = {path.rpartition(".")[2] for path in linears}
        where = f" in the last {config.num_layers} of {len(block_paths)} layers" if config.num_layers > 0 else ""
        raise ConfigError(
            f"lora.targets: {', '.join(unused)} is the name of no linear layer{where}; {nearest(unused[0], names)}"
        )
    for target, matches in found.items():
        if other := next((path for path in matches if path not in linears), None):
            raise ConfigError(
                f"lora.targets: {target} matches {other}, a {type(inside[other]).__name__}, and only linear layers can "
                "have LoRA; name linear layers more exactly, such as self_attn.q_proj."
            )
    paths = sorted({path for matches in found.values() for path in matches})
    kl = _sensitivities(model_folder, paths) if config.rank_scaling == "by_kl" else {}
    keys = mx.random.split(mx.random.key(seed), len(paths))
    modules = {}
    for path, key in zip(paths, keys):
        rank = _rank(config, path, linears[path], kl)
        modules[path] = LoRALinear(linears[path], rank, config.effective_scale(rank), config.dropout, key)
    model.update_modules(tree_unflatten(list(modules.items())))
    model.freeze()
    for module in modules.values():
        module.unfreeze(keys=list(LEAVES), recurse=False)
    return Lora(modules)


def load_adapter_weights(lora: Lora, folder: str | Path, key: str = "lora.warm_start") -> None:
    """Start from the weights of an adapter folder, which option `key` named; changes nothing unless everything fits.

    Raises:
        CheckpointError: tensors are missing, unknown, misshaped or not finite, or the scale is not the stored one.
    """
    from mlxlab.adapters import load_adapter

    config, tensors = load_adapter(folder)
    params = lora.params()
    problems = [f"{name} is missing" for name in params if name not in tensors]
    problems += [f"{name} belongs to no layer of this run" for name in tensors if name not in params]
    for name, value in params.items():
        if name in tensors and tensors[name].shape != value.shape:
            problems.append(f"{name} has shape {tensors[name].shape}, this run needs {value.shape}")
    problems += [f"{name} is not finite" for name, value in tensors.items() if not mx.isfinite(value).all().item()]
    stored = config.get("mlxlab", {}).get("scales") or {}
    default = config.get("lora_parameters", {}).get("scale")
    for path, scale in lora.scales.items():
        theirs = stored.get(path, default)
        if theirs is None or not math.isclose(theirs, scale, rel_tol=1e-6):
            trained = "does not say its scale" if theirs is None else f"was trained with scale {theirs}"
            problems.append(f"{path} {trained}, this run has {scale}")
            break
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{key}={folder} does not fit: {'; '.join(problems[:3])}{more}. Use the same lora "
            "options as that adapter, or none to start anew."
        )
    lora.update({name: tensors[name].astype(mx.float32) for name in params})


def _rank(config: LoraConfig, path: str, linear: nn.Module, kl: Mapping[str, float]) -> int:
    if config.rank_scaling == "constant":
        return config.rank
    if path in kl:
        ordered = sorted(kl.values())
        median = ordered[len(ordered) // 2]
        factor = min(max(kl[path] / median, 0.5), 2.0) if median else 1.0
        return max(1, math.ceil(config.rank * factor))
    # a layer without sensitivity, or by_bits; unquantized layers keep the rank
    return max(1, math.ceil(config.rank * getattr(linear, "bits", 4) / 4))


def _sensitivities(folder: Path | None, paths: Sequence[str]) -> dict[str, float]:
    """KL divergence of each quantized layer, by path; at least one of `paths` has one."""
    path = None if folder is None else folder / "optiq_metadata.json"
    found: dict[str, float] = {}
    if path is not None and path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            layers = content.get("per_layer") or content.get("optimization", {}).get("per_layer") or {}
            found = {name: float(entry["kl"]) for name, entry in layers.items() if entry.get("kl") is not None}
            if bad := next((name for name, kl in found.items() if not 0 <= kl < math.inf), None):
                raise ValueError(f"kl of {bad} must be >= 0 and finite, got {found[bad]}")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"lora.rank_scaling=by_kl cannot read the sensitivities in {path} ({' '.join(str(error).split())}); "
                "repair that file, or use by_bits or constant."
            ) from error
    if not found.keys() & set(paths):
        lacks = f"names other layers (such as {next(iter(found))})" if found else "has none"
        raise ConfigError(
            f"lora.rank_scaling=by_kl needs sensitivities, and {path or 'the model folder'} {lacks}; "
            "use by_bits or constant."
        )
    return found

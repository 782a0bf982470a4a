"""A checkpoint of any shape with random weights: to measure speed and memory of a model without downloading it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxlab.interfaces import ModelSource
from mlxlab.models.cache import build_once
from mlxlab.models.tiny import _tokenizer

_FORMAT = 1  # raise when the files change, so that caches are made again


@dataclass(frozen=True)
class RandomWeights(ModelSource):
    """Writes a checkpoint in mlx-lm's format, once per set of options: bfloat16, linear layers quantized.

    Activations stay in the usual range (matrices are scaled by 1/sqrt(inputs)), the texts it writes are noise.

    Args:
        config: config.json of the model: `model_type` of a class in mlx-lm, and its sizes.
        bits: width of affine quantization of linear layers and embeddings (2 to 8), or 0 for none.
        group_size: weights per scale of the quantization: 32, 64 or 128.
        seed: of the random weights.
    """

    config: dict[str, Any]
    bits: int = 4
    group_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if "model_type" not in self.config:
            raise ValueError(f"config must name a model_type, got the keys {', '.join(self.config) or 'none'}")
        if self.bits not in (0, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"bits must be 0 (none), 2, 3, 4, 5, 6 or 8, got {self.bits}")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size must be 32, 64 or 128, got {self.group_size}")

    def folder(self) -> Path:
        identity = json.dumps([_FORMAT, dataclasses.asdict(self)], sort_keys=True)
        name = f"{self.config['model_type']}-random-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        return build_once(name, self._build)

    def _build(self, folder: Path) -> None:
        from mlx_lm.utils import _get_classes

        config = dict(self.config)
        model_class, arguments = _get_classes(config)
        model = model_class(arguments.from_dict(config))
        model.set_dtype(mx.bfloat16)
        mx.random.seed(self.seed)
        # one module at a time: the whole model in 16 bits may be several times what the quantized one takes
        for _, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
            for name, value in module.items():
                if isinstance(value, mx.array) and value.ndim > 1:
                    module[name] = (mx.random.normal(value.shape) * value.shape[-1] ** -0.5).astype(mx.bfloat16)
            mx.eval(module.parameters())
        if self.bits:
            nn.quantize(model, self.group_size, self.bits)
            mx.eval(model.parameters())
            config["quantization"] = {"group_size": self.group_size, "bits": self.bits}
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _tokenizer().save_pretrained(folder)

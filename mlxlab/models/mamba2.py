"""Mamba 2: no attention at all."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class Mamba2(DecoderWalk):
    """Mamba 2: state-space layers, no attention."""

    model_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    features: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[Mapping[str, str]] = {
        "prefix_cache": "its layers hand on a recurrent state instead of keys",
        "packing": "its layers carry a state from one document into the next",
        "half_blocks": "its layers have one part only",
    }
    lora_targets: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj")
    inner_name: ClassVar[str] = "backbone"
    embedding_name: ClassVar[str] = "embeddings"
    norm_name: ClassVar[str] = "norm_f"

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return layer(h, None)

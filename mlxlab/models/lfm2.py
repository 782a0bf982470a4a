"""LFM 2: short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class Lfm2(DecoderWalk):
    """LFM 2, dense: short convolutions, attention in some layers."""

    model_types: ClassVar[tuple[str, ...]] = ("lfm2",)
    features: ClassVar[frozenset[str]] = frozenset({"half_blocks"})
    lacks: ClassVar[Mapping[str, str]] = {
        "prefix_cache": "its convolutions hand on their last inputs instead of keys",
        "packing": "its convolutions reach from one document into the next",
    }
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
        "in_proj",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )
    norm_name: ClassVar[str] = "embedding_norm"

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return layer(h, mask, cache) if layer.is_attention_layer else layer(h, None, None)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        x = layer.operator_norm(h)
        return h + (layer.self_attn(x, mask, cache) if layer.is_attention_layer else layer.conv(x))

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.feed_forward(layer.ffn_norm(h))

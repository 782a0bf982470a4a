"""Llama 4's small text models (MobileLLM): some layers without positions, normed queries and keys."""

from __future__ import annotations

from typing import ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk


class Llama4Text(DecoderWalk):
    """Dense Llama 4 text models: some layers without positions."""

    model_types: ClassVar[tuple[str, ...]] = ("llama4_text",)
    features: ClassVar[frozenset[str]] = DecoderWalk.features - {"packing"}
    lacks: ClassVar[Mapping[str, str]] = {"packing": "it scales queries by their position"}
    projection_name: ClassVar[str] = "output"

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.feed_forward(layer.post_attention_layernorm(h))

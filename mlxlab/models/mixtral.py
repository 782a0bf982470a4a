"""Mixtral: experts, of which two see each token."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import ATTENTION_TARGETS, DecoderWalk


class Mixtral(DecoderWalk):
    """Mixtral: experts that stay frozen."""

    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION_TARGETS

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.block_sparse_moe(layer.post_attention_layernorm(h))

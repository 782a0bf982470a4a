"""GLM 4 (0414): norms before and after both halves."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class Glm4(DecoderWalk):
    """GLM 4 (0414), dense: norms around both halves."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4",)
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return h + layer.post_self_attn_layernorm(layer.self_attn(layer.input_layernorm(h), mask, cache))

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(h)))

"""Qwen 3 Next: three layers of gated delta rule, then one of attention; experts that stay frozen."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class Qwen3Next(DecoderWalk):
    """Qwen 3 Next: gated delta rule and gated attention, experts that stay frozen."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    features: ClassVar[frozenset[str]] = frozenset({"half_blocks"})
    lacks: ClassVar[Mapping[str, str]] = {
        "prefix_cache": "most layers hand on a recurrent state instead of keys",
        "packing": "most layers carry a state from one document into the next",
    }
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj")

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return self.feed(layer, self.attend(layer, h, mask, cache))

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        x = layer.input_layernorm(h)
        if not layer.is_linear:
            return h + layer.self_attn(x, mask, cache)
        # In evaluation mode it takes a Metal kernel that has no gradient.
        mode = layer.linear_attn.training
        layer.linear_attn.train(True)
        try:
            return h + layer.linear_attn(x, None, None)
        finally:
            layer.linear_attn.train(mode)

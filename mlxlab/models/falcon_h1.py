"""Falcon H1: a state-space mixer and attention side by side in every layer."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class FalconH1(DecoderWalk):
    """Falcon H1: Mamba 2 and attention side by side, scaled logits."""

    model_types: ClassVar[tuple[str, ...]] = ("falcon_h1",)
    features: ClassVar[frozenset[str]] = frozenset({"half_blocks"})
    lacks: ClassVar[Mapping[str, str]] = {
        "prefix_cache": "its mixers hand on a recurrent state instead of keys",
        "packing": "its mixers carry a state from one document into the next",
    }
    lora_targets: ClassVar[tuple[str, ...]] = (*DecoderWalk.lora_targets, "in_proj", "out_proj")
    norm_name: ClassVar[str] = "final_layernorm"

    def logit_options(self) -> dict[str, float | None]:
        args = self.text.args
        return {"scale": args.lm_head_multiplier / args.embedding_multiplier} if args.tie_word_embeddings else {}

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return layer(h, (None, cache), mask, None)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        x = layer.input_layernorm(h)
        return h + layer.mamba(x) + layer.self_attn(x, mask, cache)

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.feed_forward(layer.pre_ff_layernorm(h))

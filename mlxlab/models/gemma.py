"""Gemma 1, 2 and 3. (Gemma 3n and 4 hand keys and values from layer to layer; they have files of their own.)"""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.gemma3_text import clip_residual

from mlxlab.interfaces import Attention, Block, Constants, State
from mlxlab.models.decoder import DecoderWalk, Mask


class Gemma(DecoderWalk):
    """Gemma 1: scaled embedding."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma",)

    def scale_embedding(self, h: mx.array) -> mx.array:
        return h * (self.inner.args.hidden_size**0.5)


class Gemma2(DecoderWalk):
    """Gemma 2: softcaps in attention and at the logits; full attention in every layer, as in mlx-lm.

    The published model has a window of 4096 tokens in every second layer, which mlx-lm leaves out: up to that length
    both are the same.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    features: ClassVar[frozenset[str]] = DecoderWalk.features - {"packing"}
    lacks: ClassVar[Mapping[str, str]] = {"packing": "its attention has a softcap and knows no documents"}

    def logit_options(self) -> dict[str, float | None]:
        return {"softcap": self.text.final_logit_softcapping}

    def scale_embedding(self, h: mx.array) -> mx.array:
        return h * (self.inner.args.hidden_size**0.5)

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        return {"h": block.module(state["h"], _array_mask(attention), attention.cache)}

    def run_half(self, block: Block, half: int, state: State, constants: Constants, attention: Attention) -> State:
        layer, h = block.module, state["h"]
        if half == 0:
            update = layer.self_attn(layer.input_layernorm(h), _array_mask(attention), attention.cache)
            return {"h": h + layer.post_attention_layernorm(update)}
        return {"h": h + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(h)))}


class Gemma3(DecoderWalk):
    """Gemma 3, text: sliding and full layers, norms around both halves."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")

    def windows(self) -> list[int | None]:
        return [self.inner.window_size if layer.self_attn.is_sliding else None for layer in self.inner.layers]

    def scale_embedding(self, h: mx.array) -> mx.array:
        # rounded to bfloat16 whatever the dtype, as the model was trained
        return h * mx.array(self.inner.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        update = layer.self_attn(layer.input_layernorm(h), mask, cache)
        return clip_residual(h, layer.post_attention_layernorm(update))

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        update = layer.mlp(layer.pre_feedforward_layernorm(h))
        return clip_residual(h, layer.post_feedforward_layernorm(update))


def _array_mask(attention: Attention) -> mx.array | None:
    """The mask as an array: these layers compute their softmax themselves, and know no mask by name."""
    mask = attention.mask()
    return create_causal_mask(attention.length, attention.offset) if isinstance(mask, str) else mask

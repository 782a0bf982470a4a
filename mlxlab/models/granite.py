"""Granite 3: multipliers of embedding, attention, residuals and logits; dense, and with experts."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import ATTENTION_TARGETS, DecoderWalk, Mask, SwigluWalk


class Granite(SwigluWalk):
    """Granite 3, dense: multipliers of embedding, residuals and logits."""

    model_types: ClassVar[tuple[str, ...]] = ("granite",)

    def logit_options(self) -> dict[str, float | None]:
        return {"scale": 1 / self.text.logits_scaling}

    def scale_embedding(self, h: mx.array) -> mx.array:
        return h * self.inner.embedding_multiplier

    def residual(self, layer: nn.Module) -> float:
        return layer.residual_multiplier


class GraniteMoe(DecoderWalk):
    """Granite 3 with experts, which stay frozen."""

    model_types: ClassVar[tuple[str, ...]] = ("granitemoe",)
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION_TARGETS

    def logit_options(self) -> dict[str, float | None]:
        return {"scale": 1 / self.text.logits_scaling}

    def scale_embedding(self, h: mx.array) -> mx.array:
        return h * self.inner.embedding_multiplier

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        update = layer.self_attn(layer.input_layernorm(h), mask, cache)
        return h + update * layer.residual_multiplier

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        update = layer.block_sparse_moe(layer.post_attention_layernorm(h))
        return h + update * layer.residual_multiplier

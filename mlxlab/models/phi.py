"""Phi 1 and 2 (parallel blocks), Phi 3 and 4 (joined projections), and Phi 3.5 with experts."""

from __future__ import annotations

from typing import ClassVar, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import ATTENTION_TARGETS, DecoderWalk


class Phi(DecoderWalk):
    """Phi 1, 1.5 and 2: parallel blocks, biases, also at the logits."""

    model_types: ClassVar[tuple[str, ...]] = ("phi",)
    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing"})
    lacks: ClassVar[Mapping[str, str]] = {"half_blocks": "attention and feed-forward stand side by side"}
    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
    norm_name: ClassVar[str] = "final_layernorm"


class Phi3(DecoderWalk):
    """Phi 3 and 4: one projection for queries, keys and values, one for gate and up."""

    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    lora_targets: ClassVar[tuple[str, ...]] = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class PhiMoe(DecoderWalk):
    """Phi 3.5 with experts, which stay frozen; a bias at the logits."""

    model_types: ClassVar[tuple[str, ...]] = ("phimoe",)
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION_TARGETS

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.block_sparse_moe(layer.post_attention_layernorm(h))

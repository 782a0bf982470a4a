"""MiniCPM 1, 2 and 3: multipliers of embedding, residuals and logits; MiniCPM 3 has latent attention."""

from __future__ import annotations

from typing import Any, ClassVar, Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.interfaces import Problem
from mlxlab.models.decoder import SwigluWalk


class _MiniCPMWalk(SwigluWalk):
    def logit_options(self) -> dict[str, float | None]:
        args = self.text.args
        return {} if args.tie_word_embeddings else {"scale": args.dim_model_base / args.hidden_size}

    def scale_embedding(self, h: mx.array) -> mx.array:
        return h * self.inner.args.scale_emb

    def residual(self, layer: nn.Module) -> float:
        return layer.scale_depth / layer.num_hidden_layers**0.5


class MiniCPM(_MiniCPMWalk):
    """MiniCPM 1 and 2: multipliers of embedding, residuals and logits."""

    model_types: ClassVar[tuple[str, ...]] = ("minicpm",)

    @classmethod
    def problems(cls, model_config: Mapping[str, Any]) -> Iterable[Problem]:
        if model_config.get("tie_word_embeddings"):
            yield Problem(
                "mlx-lm cannot load a minicpm checkpoint with tie_word_embeddings=true",
                "set it to false in config.json; the projection is then a copy of the embedding",
            )


class MiniCPM3(_MiniCPMWalk):
    """MiniCPM 3: latent attention, multipliers of embedding, residuals and logits."""

    model_types: ClassVar[tuple[str, ...]] = ("minicpm3",)
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

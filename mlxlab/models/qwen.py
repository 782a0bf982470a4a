"""Qwen 2, 2.5 and 3: dense, and with experts."""

from __future__ import annotations

from typing import ClassVar

from mlxlab.models.decoder import ATTENTION_TARGETS, DecoderWalk, SwigluWalk


class Qwen(SwigluWalk):
    """Qwen 2, 2.5 and 3, dense."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")


class QwenMoe(DecoderWalk):
    """Qwen 2 and 3 with experts, which stay frozen."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_moe", "qwen3_moe")
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION_TARGETS

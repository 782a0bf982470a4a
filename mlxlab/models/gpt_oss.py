"""gpt-oss: attention sinks, every second layer with a sliding window, experts."""

from __future__ import annotations

from typing import ClassVar

from mlxlab.models.decoder import ATTENTION_TARGETS, DecoderWalk


class GptOss(DecoderWalk):
    """gpt-oss: attention sinks, sliding layers, experts that stay frozen."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    lora_targets: ClassVar[tuple[str, ...]] = ATTENTION_TARGETS

    def windows(self) -> list[int | None]:
        return [self.inner.window_size if kind != "full_attention" else None for kind in self.inner.layer_types]

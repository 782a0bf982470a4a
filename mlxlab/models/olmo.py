"""OLMo 2 and 3: norms after attention and feed-forward instead of before them."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlxlab.models.decoder import DecoderWalk, Mask


class Olmo(DecoderWalk):
    """OLMo 2 and 3: norms after each half; OLMo 3 has sliding layers."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo2", "olmo3")

    def windows(self) -> list[int | None]:
        if self.text.model_type == "olmo2":
            return super().windows()
        sliding = [kind == "sliding_attention" for kind in self.inner.layer_types]
        return [self.inner.sliding_window if slides else None for slides in sliding]

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return h + layer.post_attention_layernorm(layer.self_attn(h, mask, cache))

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        return h + layer.post_feedforward_layernorm(layer.mlp(h))

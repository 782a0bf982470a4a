"""Cohere's Command R and Command R7B: parallel blocks and scaled logits."""

from __future__ import annotations

from typing import ClassVar, Mapping

from mlxlab.models.decoder import DecoderWalk


class Cohere(DecoderWalk):
    """Command R (parallel blocks, scaled logits) and R7B (also sliding layers; full ones without positions)."""

    model_types: ClassVar[tuple[str, ...]] = ("cohere", "cohere2")
    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing"})
    lacks: ClassVar[Mapping[str, str]] = {"half_blocks": "attention and feed-forward stand side by side"}

    def windows(self) -> list[int | None]:
        if self.text.model_type == "cohere":
            return super().windows()
        return [self.inner.window_size if layer.self_attn.use_sliding_window else None for layer in self.inner.layers]

    def logit_options(self) -> dict[str, float | None]:
        return {"scale": self.inner.args.logit_scale}

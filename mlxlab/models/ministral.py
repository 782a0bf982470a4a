"""Ministral 3: queries grow with their position. Also the Mistral 3 wrapper around it or around a llama."""

from __future__ import annotations

from typing import Any, ClassVar, Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab.interfaces import Problem
from mlxlab.models.decoder import Mask, SwigluWalk, llama_windows

_INNER = ("ministral3", "mistral", "llama")


class Ministral(SwigluWalk):
    """Ministral 3 (queries scaled by position), and the text model inside Mistral 3."""

    model_types: ClassVar[tuple[str, ...]] = ("ministral3", "mistral3")
    features: ClassVar[frozenset[str]] = SwigluWalk.features - {"packing"}
    lacks: ClassVar[Mapping[str, str]] = {"packing": "it scales queries by their position"}

    @classmethod
    def problems(cls, model_config: Mapping[str, Any]) -> Iterable[Problem]:
        inner = model_config.get("text_config", model_config).get("model_type", "llama")
        if inner not in _INNER:
            yield Problem(
                f"family Ministral has no support for {inner} inside mistral3",
                f"use a checkpoint with one of {', '.join(_INNER)} inside",
            )

    def windows(self) -> list[int | None]:
        return llama_windows(self.inner)

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return layer(h, *self._scale(), mask, cache)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return h + layer.self_attn(layer.input_layernorm(h), *self._scale(), mask, cache)

    def _scale(self) -> tuple[None, ...]:
        """Ministral's layers take a scale of the queries before the mask, and compute it themselves if it is None."""
        return (None,) if self.text.model_type == "ministral3" else ()

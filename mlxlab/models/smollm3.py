"""SmolLM3: every fourth layer has no positions."""

from __future__ import annotations

from typing import ClassVar

from mlxlab.models.decoder import SwigluWalk, llama_windows


class SmolLM3(SwigluWalk):
    """SmolLM3: some layers without positions."""

    model_types: ClassVar[tuple[str, ...]] = ("smollm3",)

    def windows(self) -> list[int | None]:
        return llama_windows(self.inner)

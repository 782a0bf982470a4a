"""Supervised fine-tuning: next-token cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

import mlx.core as mx

from mlxlab.interfaces import Method, Metrics, Scores

SCOPES = ("full", "response")


def check_scope(scope: str) -> None:
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")


@dataclass(frozen=True)
class Sft(Method):
    """loss = -(1/n) sum of log p(token), over all n supervised tokens of the update (not a mean of row means).

    Args:
        scope: "response" supervises the response only, "full" the prompt as well.
    """

    scope: str = "response"

    records: ClassVar[str] = "completion"
    branches: ClassVar[tuple[str, ...]] = ("completion",)
    linear: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 2e-4

    def __post_init__(self) -> None:
        check_scope(self.scope)

    def spans(self) -> Mapping[str, frozenset[str]]:
        return {"completion": frozenset({"response"} if self.scope == "response" else {"prompt", "response"})}

    def loss(self, scores: Scores, reference: Scores | None) -> tuple[mx.array, Metrics]:
        loss = -scores.token_mean(*scores.spans)
        return loss, {"nll": mx.stop_gradient(loss)}

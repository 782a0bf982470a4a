"""Odds-ratio preference optimization (Hong, Lee and Thorne, 2024, equations 4 to 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

import mlx.core as mx

from mlxlab.interfaces import Method, Metrics, Scores
from mlxlab.methods.logmath import log1mexp, softplus
from mlxlab.methods.sft import check_scope

CHOSEN, REJECTED, PROMPT = ("chosen", "response"), ("rejected", "response"), ("chosen", "prompt")


@dataclass(frozen=True)
class Orpo(Method):
    """loss = nll + weight * mean over rows of -log sigmoid(log odds(chosen) - log odds(rejected)).

    With lw and ll the mean log-probability per response token of the chosen and rejected response,
    log odds(x) = x - log(1 - exp(x)). No reference model.

    Args:
        weight: of the odds-ratio term (lambda in the paper), >= 0.
        scope: what nll is. "full": token mean over prompt and response of the chosen branch, as in the authors'
            code; "response": mean over rows of -lw. lw and ll are response-only in both.
    """

    weight: float = 0.1
    scope: str = "full"

    records: ClassVar[str] = "preference"
    branches: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    learning_rate: ClassVar[float] = 1e-4

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"weight must be >= 0, got {self.weight}")
        check_scope(self.scope)

    def spans(self) -> Mapping[str, frozenset[str]]:
        chosen = {"prompt", "response"} if self.scope == "full" else {"response"}
        return {"chosen": frozenset(chosen), "rejected": frozenset({"response"})}

    def loss(self, scores: Scores, reference: Scores | None) -> tuple[mx.array, Metrics]:
        chosen, rejected = scores[CHOSEN].mean(), scores[REJECTED].mean()
        log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
        odds = scores.row_mean(softplus(-log_odds))
        if self.scope == "full":
            nll = -scores.token_mean(PROMPT, CHOSEN)
        else:
            nll = scores.row_mean(-chosen)
        metrics = {
            "accuracy": scores.row_mean(chosen > rejected),
            "margin": scores.row_mean(log_odds),
            "nll": nll,
            "odds": odds,
            "logp_chosen": scores.row_mean(chosen),
            "logp_rejected": scores.row_mean(rejected),
        }
        return nll + self.weight * odds, {name: mx.stop_gradient(value) for name, value in metrics.items()}

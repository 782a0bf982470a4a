"""Direct preference optimization (Rafailov et al., 2023, equation 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

import mlx.core as mx

from mlxlab.interfaces import Method, Metrics, Scores
from mlxlab.methods.logmath import softplus

CHOSEN, REJECTED = ("chosen", "response"), ("rejected", "response")


@dataclass(frozen=True)
class Dpo(Method):
    """loss = mean over rows of -log sigmoid(beta ((pi_w - ref_w) - (pi_l - ref_l))).

    pi and ref are summed log-probabilities of a response with LoRA on and off (the frozen base is the reference).

    Args:
        beta: strength of the pull towards the reference, > 0.
    """

    beta: float = 0.1

    records: ClassVar[str] = "preference"
    branches: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    needs_reference: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 5e-5

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be > 0, got {self.beta}")

    def spans(self) -> Mapping[str, frozenset[str]]:
        return {branch: frozenset({"response"}) for branch in self.branches}

    def loss(self, scores: Scores, reference: Scores | None) -> tuple[mx.array, Metrics]:
        chosen = self.beta * (scores[CHOSEN].sum() - reference[CHOSEN].sum())
        rejected = self.beta * (scores[REJECTED].sum() - reference[REJECTED].sum())
        margin = chosen - rejected
        loss = scores.row_mean(softplus(-margin))
        metrics = {
            "accuracy": scores.row_mean(margin > 0),
            "margin": scores.row_mean(margin),
            "reward_chosen": scores.row_mean(chosen),
            "reward_rejected": scores.row_mean(rejected),
            "nll": -scores.token_mean(CHOSEN),
        }
        return loss, {name: mx.stop_gradient(value) for name, value in metrics.items()}

"""Metrics of every row by itself, and how far the numbers of a sample of rows can be trusted."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any, Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxlab.engine import StepEngine
from mlxlab.interfaces import Example, Method, Metrics, Scores, Span, Totals

Z = 1.959963984540054  # of the normal distribution, two-sided 95 %
RESAMPLES = 2000
INTERVALS = f"95 %: Wilson for accuracy, else percentile bootstrap over rows ({RESAMPLES} resamples)"
_NLL, _TOKENS = "_nll", "_tokens"  # of the responses of a method's first branch


class Measured:
    """A method that also reports -log p and number of tokens of the responses of its first branch.

    The engine sees everything else of the method as it is.
    """

    def __init__(self, method: Method):
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def spans(self) -> Mapping[str, frozenset[str]]:
        spans, branch = dict(self._method.spans()), self._method.branches[0]
        return {**spans, branch: spans.get(branch, frozenset()) | {"response"}}

    def loss(self, scores: Scores, reference: Scores | None) -> tuple[mx.array, Metrics]:
        own = {(branch, part) for branch, parts in self._method.spans().items() for part in parts}
        restricted = [None if s is None else _only(s, own) for s in (scores, reference)]
        loss, metrics = self._method.loss(*restricted)
        response = scores[self._method.branches[0], "response"]
        return loss, {**metrics, _NLL: -response.values.sum(), _TOKENS: response.count().sum()}


def measure(engine: StepEngine, rows: Sequence[Example], base: bool = False) -> dict[str, dict[str, float | None]]:
    """Metrics of `rows` as {"value", "low", "high"}: loss and metrics of the method, and perplexity.

    Every row is a batch of its own with the denominators of all rows, so values are what validation during training
    reports. A row's share of a metric times the number of rows is the value of that row.

    Args:
        engine: with a `Measured` method.
        base: with LoRA off.

    Returns:
        intervals are 95 %; low and high are None where there are too few rows.
    """
    count = len(rows)
    totals = Totals.of((rows[i] for i in range(count)), engine.method.spans())
    records = []
    with engine.lora.disabled() if base else nullcontext():
        for i in range(count):
            loss, metrics = engine.evaluate([rows[i]], totals)
            records.append({"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}})
    shares = {name: np.array([record[name] for record in records]) for name in records[0]}
    likelihood = np.stack([shares.pop(_NLL), shares.pop(_TOKENS)], axis=1)
    result = {"perplexity": _value(perplexity(likelihood), bootstrap(likelihood, perplexity))}
    for name, column in shares.items():
        values = column * count
        successes = values.round()
        if name.startswith("accuracy") and np.abs(values - successes).max() < 1e-3:
            interval = wilson(int(successes.sum()), count)
        else:
            interval = bootstrap(values)
        result[name] = _value(float(column.sum()), interval)
    return result


def perplexity(rows: np.ndarray) -> float:
    """exp of the mean of -log p over all tokens; rows [n, 2] hold sums of -log p and numbers of tokens."""
    nll, tokens = rows.sum(axis=0)
    return math.exp(min(nll / max(tokens, 1.0), 700.0))  # exp(710) is no float any more


def wilson(successes: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927): right for few rows, too, and for shares of 0 and 1."""
    if not 0 <= successes <= count or count < 1:
        raise ValueError(f"successes must be between 0 and count >= 1, got {successes} of {count}")
    share = successes / count
    spread = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    center, scale = share + Z**2 / (2 * count), 1 + Z**2 / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def bootstrap(
    rows: np.ndarray, statistic: Callable[[np.ndarray], float] = np.mean
) -> tuple[float, float] | None:
    """95 % interval of a statistic of rows [n] or [n, k]: percentiles over resamples of whole rows (Efron, 1979).

    The same rows always give the same interval. None for fewer than 2 rows, which say nothing about spread.
    """
    if len(rows) < 2:
        return None
    rng = np.random.default_rng(0)
    values = [statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _only(scores: Scores, spans: set[Span]) -> Scores:
    return dataclasses.replace(scores, spans={span: value for span, value in scores.spans.items() if span in spans})


def _value(value: float, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"value": value, "low": low, "high": high}

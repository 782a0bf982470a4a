"""Metrics of every row by itself, and how far the numbers of a sample of rows can be trusted."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any, Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxlab.engine import StepEngine
from mlxlab.interfaces import Example, Method, Metrics, Scores, Totals

Z = 1.959963984540054  # of the normal distribution, two-sided 95 %
RESAMPLES = 2000
INTERVALS = f"95 %: Wilson for accuracy, else percentile bootstrap over rows ({RESAMPLES} resamples)"
_NLL, _TOKENS = "_nll", "_tokens"  # of the responses of a method's first branch
_ROW = "_row "  # before the name of a metric whose denominators are those of the batch


class Measured:
    """A method that reports more: every metric as if its batch were all there is, and the likelihood of responses.

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
        response = scores[self._method.branches[0], "response"]
        loss, metrics = self._loss(scores, reference, scores.totals)
        counts = {span: logps.values.shape[0] for span, logps in scores.spans.items()}
        row_loss, row_metrics = self._loss(scores, reference, Totals(response.batch_rows, counts))
        rows = {f"{_ROW}{name}": value for name, value in {"loss": row_loss, **row_metrics}.items()}
        return loss, {**metrics, **rows, _NLL: -response.values.sum(), _TOKENS: response.count().sum()}

    def _loss(self, scores: Scores, reference: Scores | None, totals: Totals) -> tuple[mx.array, Metrics]:
        own = {(branch, part) for branch, parts in self._method.spans().items() for part in parts}
        seen = []
        for side in (scores, reference):
            spans = None if side is None else {span: logps for span, logps in side.spans.items() if span in own}
            seen.append(None if side is None else dataclasses.replace(side, spans=spans, totals=totals))
        return self._method.loss(*seen)


def measure(engine: StepEngine, rows: Sequence[Example], base: bool = False) -> dict[str, dict[str, float | None]]:
    """Metrics of `rows` as {"value", "low", "high"}: loss and metrics of the method, and perplexity.

    Every row is a batch of its own: with the denominators of all rows, so that values are what validation during
    training reports, and with its own, which gives the value of the row; the quotient is its weight in the metric.

    Args:
        engine: with a `Measured` method.
        base: with LoRA off.

    Returns:
        intervals are 95 %; low and high are None where there are too few rows.
    """
    count = len(rows)
    totals = Totals.of(rows, engine.method.spans())
    records = []
    with engine.lora.disabled() if base else nullcontext():
        for row in rows:
            loss, metrics = engine.evaluate([row], totals)
            records.append({"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}})
    columns = {name: np.array([record[name] for record in records]) for name in records[0]}
    likelihood = np.stack([columns.pop(_NLL), columns.pop(_TOKENS)], axis=1)
    result = {"perplexity": _value(perplexity(likelihood), bootstrap(likelihood, perplexity))}
    for name in [name for name in columns if not name.startswith(_ROW)]:
        shares, values = columns[name], columns[_ROW + name]
        if name.startswith("accuracy") and set(values) <= {0.0, 1.0}:
            interval = wilson(int(values.sum()), count)
        else:
            weights = np.divide(shares, values, out=np.full(count, 1 / count), where=values != 0)
            interval = bootstrap(np.stack([shares, weights], axis=1), lambda r: r[:, 0].sum() / r[:, 1].sum())
        result[name] = _value(float(shares.sum()), interval)
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
    low, high = (center - spread) / scale, (center + spread) / scale
    return 0.0 if successes == 0 else low, 1.0 if successes == count else high  # exactly, without rounding


def bootstrap(rows: np.ndarray, statistic: Callable[[np.ndarray], float] = np.mean) -> tuple[float, float] | None:
    """95 % interval of a statistic of rows [n] or [n, k]: percentiles over resamples of whole rows (Efron, 1979).

    The same rows always give the same interval. None for fewer than 2 rows, which say nothing about spread.
    """
    if len(rows) < 2:
        return None
    rng = np.random.default_rng(0)
    values = [statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _value(value: float, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"value": value, "low": low, "high": high}

"""Pinned numbers, finite differences and limits of every method."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxlab.interfaces import Scores, TokenLogps, Totals
from mlxlab.methods.dpo import Dpo
from mlxlab.methods.logmath import log1mexp, softplus
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft

RESPONSES = [("chosen", "response"), ("rejected", "response")]


def scores(rows: dict, batch_rows: int = 1, totals: Totals | None = None) -> Scores:
    """Scores from {span: [(row, logp), ...]}."""
    spans = {}
    for span, pairs in rows.items():
        row, values = zip(*pairs)
        spans[span] = TokenLogps(mx.array(values, mx.float32), mx.array(row, mx.int32), batch_rows)
    counts = {span: len(pairs) for span, pairs in rows.items()}
    return Scores(spans, totals or Totals(batch_rows, counts))


def pair_scores(chosen, rejected) -> Scores:
    """One token per response, so that each value is a mean log-probability."""
    rows = {
        RESPONSES[0]: list(enumerate(chosen)),
        RESPONSES[1]: list(enumerate(rejected)),
    }
    return scores(rows, len(chosen))


@pytest.mark.parametrize(
    "chosen, rejected, weight, loss",
    [
        ([-0.5, -1.2, -0.8], [-1.5, -1.0, -2.3], 0.1, 0.87177973985672),
        ([-0.5, -1.2, -0.8], [-1.5, -1.0, -2.3], 1.0, 1.2177971601486206),
        ([-0.7], [-1.9], 0.1, 0.7164066433906555),
        ([-1.0], [-2.0], 0.1, 1.02381830264),
    ],
)
def test_orpo_values(chosen, rejected, weight, loss):
    value, _ = Orpo(weight, "response").loss(pair_scores(chosen, rejected), None)
    assert value.item() == pytest.approx(loss, rel=2e-6)


def test_orpo_gradient_at_the_mean_log_probabilities():
    def loss(chosen, rejected):
        spans = {span: TokenLogps(value[None], mx.array([0]), 1) for span, value in zip(RESPONSES, (chosen, rejected))}
        return Orpo(0.1, "response").loss(Scores(spans, Totals(1, {})), None)[0]

    gradient = mx.grad(loss, argnums=(0, 1))(mx.array(-1.0), mx.array(-2.0))
    assert gradient[0].item() == pytest.approx(-1.03352866074, rel=1e-6)
    assert gradient[1].item() == pytest.approx(0.0245114150616, rel=1e-5)


def test_orpo_full_scope_is_the_token_mean_of_prompt_and_response():
    rows = {
        ("chosen", "prompt"): [(0, -2.0)] * 3,
        ("chosen", "response"): [(0, -0.5)] * 2,
        ("rejected", "response"): [(0, -0.5)] * 2,
    }
    value, metrics = Orpo(weight=0.0).loss(scores(rows), None)
    assert value.item() == pytest.approx(1.4, rel=1e-6)
    assert metrics["odds"].item() == pytest.approx(math.log(2), rel=1e-6)  # equal responses


def test_orpo_metrics_and_their_signs():
    _, metrics = Orpo(0.1, "response").loss(pair_scores([-0.5, -2.0], [-1.5, -1.0]), None)
    assert metrics["accuracy"].item() == 0.5
    odds = [math.log(math.exp(x) / (1 - math.exp(x))) for x in (-0.5, -1.5, -2.0, -1.0)]
    assert metrics["margin"].item() == pytest.approx((odds[0] - odds[1] + odds[2] - odds[3]) / 2, rel=1e-5)


def test_dpo_starts_at_ln_2_with_no_preference():
    policy = pair_scores([-3.0, -4.0], [-2.0, -9.0])
    value, metrics = Dpo().loss(policy, policy)
    assert value.item() == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["margin"].item() == 0 and metrics["accuracy"].item() == 0


def test_dpo_values():
    """beta ((-3 + 4) - (-5 + 3)) = 0.5 * 3 on summed, not mean, log-probabilities."""
    policy = scores({RESPONSES[0]: [(0, -1.0), (0, -2.0)], RESPONSES[1]: [(0, -5.0)]})
    reference = scores({RESPONSES[0]: [(0, -2.0), (0, -2.0)], RESPONSES[1]: [(0, -3.0)]})
    value, metrics = Dpo(beta=0.5).loss(policy, reference)
    assert value.item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-6)
    assert metrics["margin"].item() == pytest.approx(1.5) and metrics["accuracy"].item() == 1


def test_sft_is_a_token_mean_over_the_update():
    """Mean of means would be 2.5 here: rows of one and three tokens."""
    span = ("completion", "response")
    value, _ = Sft().loss(scores({span: [(0, -3.0), (1, -1.0), (1, -2.0), (1, -3.0)]}, 2), None)
    assert value.item() == pytest.approx(2.25)


def test_shares_of_micro_batches_add_up_to_the_update():
    """Loss (w a - b)^2 at w = 1 over micro-batches [(1, 3)] and [(2, 1), (1, 0), (3, 2)]: 1.75 and gradient 2."""
    span, totals = ("completion", "response"), Totals(4, {("completion", "response"): 4})

    def share(w, pairs):
        values = mx.stack([-mx.square(w * a - b) for a, b in pairs])
        tokens = TokenLogps(values, mx.arange(len(pairs)), len(pairs))
        return Sft().loss(Scores({span: tokens}, totals), None)[0]

    parts = [mx.value_and_grad(share)(mx.array(1.0), pairs) for pairs in ([(1, 3)], [(2, 1), (1, 0), (3, 2)])]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(1.75)
    assert sum(gradient.item() for _, gradient in parts) == pytest.approx(2.0)


@pytest.mark.parametrize("method", [Sft(), Sft("full"), Dpo(0.3), Orpo(), Orpo(0.7, "response")], ids=repr)
def test_gradients_match_finite_differences(method):
    rng = np.random.default_rng(0)
    rows = {(branch, part): rng.integers(0, 2, 5) for branch, parts in method.spans().items() for part in sorted(parts)}
    totals = Totals(3, {span: 7 for span in rows})
    reference = scores({span: [(int(r), -1.5) for r in row] for span, row in rows.items()}, 2, totals)
    values = {span: mx.array(rng.uniform(-3, -0.2, 5), mx.float32) for span in rows}

    def loss(values):
        spans = {span: TokenLogps(values[span], mx.array(rows[span]), 2) for span in rows}
        return method.loss(Scores(spans, totals), reference)[0]

    by_name = {f"{b}:{p}": v for (b, p), v in values.items()}
    gradient = mx.grad(lambda tree: loss({tuple(k.split(":")): v for k, v in tree.items()}))(by_name)
    for span in rows:
        for i in range(5):
            step = mx.zeros(5).at[i].add(1e-2)
            up, down = (loss({**values, span: values[span] + sign * step}).item() for sign in (1, -1))
            assert gradient[":".join(span)][i].item() == pytest.approx((up - down) / 2e-2, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize(
    "x, value",
    [
        (-1e-10, -23.02585093),
        (-1e-7, -16.118095701),
        (-0.001, -6.90825523732),
        (-math.log(2), -math.log(2)),
        (-50.0, -1.92875e-22),
    ],
)
def test_log1mexp_values(x, value):
    assert log1mexp(mx.array(x)).item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("chosen", [0.0, -1e-10, -1e-7, -1e-4, -80.0])
def test_a_certain_response_keeps_loss_and_gradient_finite(chosen):
    def loss(x):
        spans = {s: TokenLogps(v[None], mx.array([0]), 1) for s, v in zip(RESPONSES, (x, mx.array(-1.0)))}
        return Orpo(0.1, "response").loss(Scores(spans, Totals(1, {})), None)[0]

    value, gradient = mx.value_and_grad(loss)(mx.array(chosen))
    assert math.isfinite(value.item()) and math.isfinite(gradient.item())


def test_softplus_of_large_arguments():
    assert softplus(mx.array([-200.0, 0.0, 200.0])).tolist() == pytest.approx([0.0, math.log(2), 200.0])


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Orpo(weight=-1.0), r"weight must be >= 0, got -1\.0"),
        (lambda: Orpo(weight=float("nan")), "weight must be >= 0, got nan"),
        (lambda: Orpo(scope="all"), "scope must be one of full, response, got 'all'"),
        (lambda: Sft(scope="prompt"), "scope must be one of full, response, got 'prompt'"),
        (lambda: Dpo(beta=0.0), r"beta must be > 0, got 0\.0"),
    ],
)
def test_ranges(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()

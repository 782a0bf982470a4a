"""AdamW, schedules, LoRA+ and clipping: pinned numbers."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.optim import OptimConfig, Optimizer, clip_by_global_norm, learning_rate_at

NAMES = ("layer.lora_a", "layer.lora_b")


def rates(total, **options):
    config = OptimConfig(learning_rate=1e-3, **options)
    return [learning_rate_at(step, config, total) for step in range(1, total + 1)]


def update(value, gradient, steps=1, total=10, **options):
    options = {"learning_rate": 0.1, "schedule": "constant", "weight_decay": 0.0, **options}
    optimizer = Optimizer(OptimConfig(**options), total)
    params = {name: mx.array([value]) for name in NAMES}
    for step in range(1, steps + 1):
        params = optimizer.update(params, {name: mx.array([gradient]) for name in NAMES}, step)
    return [params[name].item() for name in NAMES]


def test_warm_up_and_cosine_count_updates():
    """32 micro-batches by 4 are 8 updates; warm-up 4, then down to zero."""
    expected = [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 8.5355e-4, 5e-4, 1.4645e-4]
    assert rates(8, warmup=4, final_ratio=0.0) == pytest.approx(expected, rel=1e-4)


def test_schedules():
    assert rates(4, schedule="constant", warmup=2) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    linear = rates(5, schedule="linear", final_ratio=0.2)
    assert linear[0] == pytest.approx(1e-3)
    assert [a - b for a, b in zip(linear, linear[1:])] == pytest.approx([1.6e-4] * 4)
    cosine = rates(110, warmup=10)
    assert (cosine[0], cosine[9]) == pytest.approx((1e-4, 1e-3)) and cosine[-1] == pytest.approx(1e-4, rel=1e-2)


def test_first_step_is_bias_corrected():
    assert update(1.0, 2.0) == pytest.approx([0.9, 0.9], abs=1e-5)


def test_decay_alone():
    assert update(10.0, 0.0, weight_decay=0.5) == pytest.approx([9.5, 9.5], abs=1e-5)


def test_lora_plus_multiplies_the_rate_of_b():
    assert update(1.0, 2.0, lora_plus_ratio=4.0) == pytest.approx([0.9, 0.6], abs=1e-5)
    assert update(10.0, 0.0, weight_decay=0.5, lora_plus_ratio=2.0) == pytest.approx([9.5, 9.0], abs=1e-5)


def test_a_quadratic_converges():
    optimizer = Optimizer(OptimConfig(learning_rate=0.1, schedule="constant", weight_decay=0.0), 400)
    params = {name: mx.array([3.0]) for name in NAMES}
    for step in range(1, 401):
        params = optimizer.update(params, {name: 2 * (value - 1) for name, value in params.items()}, step)
    assert [value.item() for value in params.values()] == pytest.approx([1.0, 1.0], abs=1e-2)


def test_state_continues():
    config = OptimConfig(learning_rate=0.1, schedule="cosine")
    gradient = lambda step: {name: mx.array([math.sin(step + i)]) for i, name in enumerate(NAMES)}
    straight, first, second = (Optimizer(config, 6) for _ in range(3))
    a = b = {name: mx.array([1.0]) for name in NAMES}
    for step in range(1, 7):
        a = straight.update(a, gradient(step), step)
    for step in range(1, 4):
        b = first.update(b, gradient(step), step)
    second.load_state(dict(first.state()))
    for step in range(4, 7):
        b = second.update(b, gradient(step), step)
    assert [a[n].item() for n in NAMES] == [b[n].item() for n in NAMES]


@pytest.mark.parametrize(
    "state, sentence",
    [({}, "a/step is missing"), ({"c/step": mx.array(1)}, "c/step is unknown")],
)
def test_a_strange_state_is_refused(state, sentence):
    with pytest.raises(CheckpointError, match=f"not the state of an optimizer: {sentence}"):
        Optimizer(OptimConfig(learning_rate=0.1), 5).load_state(state)


def test_clipping():
    grads = {"x": mx.array([3.0]), "y": mx.array([4.0])}
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert norm == 5.0 and [clipped["x"].item(), clipped["y"].item()] == pytest.approx([0.6, 0.8])
    for limit in (0, 6.0):
        assert clip_by_global_norm(grads, limit)[0] is grads
    assert math.isnan(clip_by_global_norm({"x": mx.array([mx.nan])}, 1.0)[1])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0 and finite, got 0.0"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"warmup": -1}, "warmup must be >= 0, got -1"),
        ({"final_ratio": 2.0}, "final_ratio must be between 0 and 1, got 2.0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1"),
        ({"lora_plus_ratio": 0.5}, "lora_plus_ratio must be >= 1 and finite, got 0.5"),
    ],
)
def test_ranges(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        OptimConfig(**{"learning_rate": 1e-3, **options})


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ConfigError, match="optim.warmup=5 takes all 5 updates of this run"):
        Optimizer(OptimConfig(learning_rate=1e-3, warmup=5), 5)

"""Every head: values and gradients over odd shapes, all kinds of weights, and the limits of float32."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxlab.heads.chunked import Chunked
from mlxlab.heads.flash import Flash
from mlxlab.heads.fused import Fused
from mlxlab.heads.naive import Naive
from mlxlab.heads.weights import HeadWeights
from mlxlab.linear import FrozenMatrix
from mlxlab.program import Program, through_head

HEADS = [Naive(), Chunked(), Chunked(3), Fused(), Fused(3), Flash(), Flash(3, 7), Flash(5, 64)]
BOUNDED = [Chunked(8), Fused(8), Flash(16, 1024)]


def direct(hidden, targets, dense, bias, scale, softcap) -> np.ndarray:
    """Log-probabilities in float64, by definition."""
    z = np.array(hidden, np.float64) @ np.array(dense, np.float64).T
    z = (z + (0 if bias is None else np.array(bias, np.float64))) * scale
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    z -= z.max(-1, keepdims=True)
    return z[np.arange(len(z)), np.array(targets)] - np.log(np.exp(z).sum(-1))


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("rows, vocabulary", [(1, 2), (7, 33), (13, 101)])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"scale": 0.0625}, {"scale": 2.0, "softcap": 4.0}, {"bias": 1}]
)
@pytest.mark.parametrize("kind", ["dense", "4", "8", "mxfp4", "dequantize"])
def test_value_and_gradient(head, rows, vocabulary, options, kind):
    rng = np.random.default_rng(rows)
    hidden = mx.array(rng.normal(size=(rows, 64)), mx.float32)
    dense = mx.array(rng.normal(size=(vocabulary, 64)), mx.float32)
    if kind == "dense":
        matrix = FrozenMatrix(dense)
    else:
        mode, bits = ("mxfp4", 4) if kind == "mxfp4" else ("affine", 4 if kind == "dequantize" else int(kind))
        policy = "dequantize" if kind == "dequantize" else "fused"
        packed = mx.quantize(dense, group_size=32, bits=bits, mode=mode)
        matrix = FrozenMatrix(*packed, group_size=32, bits=bits, mode=mode, policy=policy)
        dense = matrix.dense(mx.float32)
    bias = mx.array(rng.normal(size=vocabulary), mx.float32) if "bias" in options else None
    weights = HeadWeights(matrix, bias, options.get("scale", 1.0), options.get("softcap"))
    targets = mx.array(rng.integers(0, vocabulary, rows))
    cotangent = mx.array(rng.normal(size=rows), mx.float32)  # uniform ones hide a scalar mistaken for a vector

    logp, gradient = mx.vjp(lambda h: head(h, targets, weights), [hidden], [cotangent])
    assert logp[0].dtype == mx.float32 and logp[0].shape == (rows,)
    expected = direct(hidden, targets, dense, bias, weights.scale, weights.softcap)
    np.testing.assert_allclose(np.array(logp[0]), expected, rtol=1e-4, atol=1e-4)

    step = 1e-6
    direction = rng.normal(size=(rows, 64))
    up, down = (
        (
            np.array(cotangent)
            * direct(np.array(hidden) + s * step * direction, targets, dense, bias, weights.scale, weights.softcap)
        ).sum()
        for s in (1, -1)
    )
    slope = float((np.array(gradient[0], np.float64) * direction).sum())
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_logit_scale_is_part_of_the_head(head):
    weights = HeadWeights(FrozenMatrix(mx.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])), scale=0.0625)
    target = mx.array([0])
    loss, gradient = mx.value_and_grad(lambda h: -head(h, target, weights)[0])(mx.array([[1.0, 2.0]]))
    assert loss.item() == pytest.approx(1.162414, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-0.0208062, 0.0429544], abs=1e-6)


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_every_row_has_its_own_cotangent(head):
    weights = HeadWeights(FrozenMatrix(mx.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])))
    hidden, targets = mx.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]]), mx.array([0, 2, 1])

    def loss(h, token_weights):
        return -(head(h, targets, weights) * token_weights).sum()

    value, gradient = mx.value_and_grad(loss)(hidden, mx.array([1.0, 0.0, 2.0]))
    assert value.item() == pytest.approx(7.92485, rel=1e-5)
    assert gradient[1].tolist() == [0.0, 0.0]
    _, gradient = mx.value_and_grad(loss)(hidden, mx.array([0.0, 1.0, 2.0]))
    assert gradient[0].tolist() == [0.0, 0.0] and mx.abs(gradient[1:]).max().item() > 0.1


@pytest.mark.parametrize("head", HEADS, ids=repr)
@pytest.mark.parametrize("logits, loss", [([1e8, 1e8], math.log(2)), ([2 + 1e6, -1 + 1e6], 0.0485874)])
def test_large_close_logits_keep_their_gap(head, logits, loss):
    weights = HeadWeights(FrozenMatrix(mx.array([[logits[0]], [logits[1]]])))
    assert -head(mx.array([[1.0]]), mx.array([0]), weights).item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("head", BOUNDED, ids=repr)
def test_bounded_heads_never_hold_all_logits(head):
    """256 rows, 32768 entries: full float32 logits take 33.6 MB; a quarter of that must do, in both directions."""
    rows, vocabulary = 256, 32768
    weights = HeadWeights(FrozenMatrix(mx.random.normal((vocabulary, 8), key=mx.random.key(0))))
    hidden, targets = mx.random.normal((rows, 8), key=mx.random.key(1)), mx.arange(rows)
    mx.eval(hidden, targets, weights.matrix.weight)

    def peak(head):
        score = lambda h, t: head(h, t, weights)
        program = Program([], None, score, targets, head.rows_per_call(rows), lambda logps: (logps.sum(), {}))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        through_head(program, hidden)
        return mx.get_peak_memory() - before

    full = rows * vocabulary * 4
    assert peak(Naive()) > full
    assert peak(head) < full / 4


@pytest.mark.parametrize("head", [Chunked, Fused, Flash])
def test_chunk_sizes_are_positive(head):
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        head(chunk_tokens=0)

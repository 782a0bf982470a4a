"""Products with frozen weights: every kind of quantization, every policy, forward and backward."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxlab import linear
from mlxlab.linear import FrozenMatrix, FrozenQuantizedLinear

KINDS = [("affine", 4, 64), ("affine", 8, 64), ("affine", 3, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def packed(mode, bits, group_size, policy):
    weight = mx.random.normal((32, 64), key=mx.random.key(0))
    return FrozenMatrix(
        *mx.quantize(weight, group_size=group_size, bits=bits, mode=mode),
        group_size=group_size,
        bits=bits,
        mode=mode,
        policy=policy,
    )


@pytest.mark.parametrize("policy", ["auto", "fused", "dequantize"])
@pytest.mark.parametrize("mode, bits, group_size", KINDS)
def test_product_and_gradient_go_through_the_dequantized_weight(mode, bits, group_size, policy):
    matrix = packed(mode, bits, group_size, policy)
    x, c = (mx.random.normal(shape, key=mx.random.key(k)) for k, shape in ((1, (3, 64)), (2, (3, 32))))
    dense = matrix.dense(mx.float32)
    assert matrix.shape == dense.shape == (32, 64)
    y, gradient = mx.vjp(matrix.apply, [x], [c])
    assert mx.allclose(y[0], x @ dense.T, rtol=1e-5, atol=1e-4)
    assert mx.allclose(gradient[0], c @ dense, rtol=1e-5, atol=1e-4)
    assert mx.allclose(matrix.apply_transposed(c), c @ dense, rtol=1e-5, atol=1e-4)
    assert mx.array_equal(matrix.rows(5, 9).dense(mx.float32), dense[5:9])


@pytest.mark.parametrize("policy", ["fused", "dequantize", "resident"])
def test_install_keeps_outputs_and_bias(policy):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.second = nn.Linear(64, 8, bias=False)

        def __call__(self, x):
            return self.second(nn.relu(self.first(x)))

    model = Two()
    nn.quantize(model, group_size=32, bits=8)
    x = mx.random.normal((5, 64), key=mx.random.key(3))
    expected = model(x)
    linear.install(model, policy, mx.float32)
    assert mx.allclose(model(x), expected, rtol=1e-4, atol=1e-4)
    wanted = nn.Linear if policy == "resident" else FrozenQuantizedLinear
    assert type(model.first) is type(model.second) is wanted
    assert not model.trainable_parameters().get("first")


def test_packed_weights_stay_as_they_are():
    layer = nn.QuantizedLinear(64, 8, group_size=32, bits=4)
    frozen = FrozenQuantizedLinear(layer, "dequantize")
    for name in ("weight", "scales", "biases"):
        assert mx.array_equal(frozen[name], layer[name])
    assert (frozen.group_size, frozen.bits, frozen.mode) == (layer.group_size, layer.bits, layer.mode)

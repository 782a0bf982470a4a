"""The frozen output projection as a head sees it: matrix, bias, logit scale, softcap."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlxlab.linear import FrozenMatrix


@dataclass(frozen=True)
class HeadWeights:
    """logits = softcap * tanh(scale * (h W^T + bias) / softcap), each step only where the family has it.

    Args:
        matrix: W [V, H], dense or quantized.
        bias: [V] or None.
        scale: multiplies the raw logits (Cohere multiplies, Granite divides).
        softcap: Gemma's soft cap, or None.
    """

    matrix: FrozenMatrix
    bias: mx.array | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.matrix.shape[0]

    def tile(self, start: int, stop: int) -> HeadWeights:
        """The projection to vocabulary entries start..stop."""
        bias = None if self.bias is None else self.bias[start:stop]
        return replace(self, matrix=self.matrix.rows(start, stop), bias=bias)

    def logits(self, hidden: mx.array) -> mx.array:
        """hidden [M, H] -> logits, float32 [M, V]."""
        z = self.matrix.apply(hidden)
        if self.bias is not None:
            z = z + self.bias
        z = z.astype(mx.float32)
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * mx.tanh(z / self.softcap)

    def backproject(self, gradient: mx.array, logits: mx.array, dtype: mx.Dtype) -> mx.array:
        """Gradient at the logits [M, V] -> gradient at the hidden rows [M, H], in float32 or the product's own dtype.

        `logits` are those of the forward pass (after the softcap); the product runs in `dtype`.
        """
        if self.softcap is not None:
            gradient = gradient * (1 - mx.square(logits / self.softcap))
        if self.scale != 1.0:
            gradient = gradient * self.scale
        return self.matrix.apply_transposed(gradient.astype(dtype))

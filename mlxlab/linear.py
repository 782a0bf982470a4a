"""Products with frozen weights, quantized or not, and how they are computed.

Policies for quantized weights
    fused        MLX's quantized kernels: right for few rows, and on Metal for all
    dequantize   dequantize one matrix, multiply in full precision, forget it; again in the backward pass, which saves
                 no weights: faster than fused for thousands of rows on CUDA
    resident     dequantize once when the model is loaded and keep the result (memory for speed; the CPU's choice)
    auto         by device and number of rows
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxlab import backend

_MANY_ROWS = 256  # from here on dequantize-then-multiply wins on CUDA


@dataclass(frozen=True)
class FrozenMatrix:
    """A frozen weight [out, in]: dense, or packed with scales and biases as `mx.quantize` returns them."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 64
    bits: int = 4
    mode: str = "affine"
    policy: str = "auto"

    @classmethod
    def of(cls, module: nn.Module, policy: str = "auto", dtype: mx.Dtype = mx.float32) -> FrozenMatrix:
        """The weight of an (un)quantized Linear or Embedding; dense in `dtype` if the policy is "resident"."""
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return cls(module.weight)
        matrix = cls(
            module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode, policy
        )
        return cls(matrix.dense(dtype)) if policy == "resident" else matrix

    @property
    def quantized(self) -> bool:
        return self.scales is not None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        columns = self.weight.shape[1] * 32 // self.bits if self.quantized else self.weight.shape[1]
        return self.weight.shape[0], columns

    def rows(self, start: int, stop: int) -> FrozenMatrix:
        """Output rows start..stop, as a view."""
        parts = {name: getattr(self, name) for name in ("weight", "scales", "biases")}
        return replace(self, **{name: None if part is None else part[start:stop] for name, part in parts.items()})

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """The matrix [out, in] in full precision."""
        if not self.quantized:
            return self.weight.astype(dtype)
        options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.dequantize(self.weight, self.scales, self.biases, **options).astype(dtype)

    def apply(self, x: mx.array) -> mx.array:
        """x [..., in] -> x W^T [..., out]; differentiable in x."""
        if not self.quantized:
            return x @ self.weight.T.astype(x.dtype)
        if self._fused(x):
            return self._quantized_matmul(x, transpose=True)

        @mx.custom_function
        def product(x):
            return x @ self.dense(x.dtype).T

        @product.vjp
        def backward(primal, cotangent, _):
            return cotangent @ self.dense(primal.dtype)

        return product(x)

    def apply_transposed(self, g: mx.array) -> mx.array:
        """g [..., out] -> g W [..., in]: the backward product."""
        if not self.quantized:
            return g @ self.weight.astype(g.dtype)
        return self._quantized_matmul(g, transpose=False) if self._fused(g) else g @ self.dense(g.dtype)

    def _quantized_matmul(self, x: mx.array, transpose: bool) -> mx.array:
        options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, transpose=transpose, **options)

    def _fused(self, x: mx.array) -> bool:
        if self.policy == "auto":
            device = backend.device()
            return device == "metal" or (device == "cuda" and x.size // x.shape[-1] < _MANY_ROWS)
        return self.policy == "fused"


class FrozenQuantizedLinear(nn.QuantizedLinear):
    """A quantized layer whose product follows a policy. Parameters and their names are those of its base class."""

    def __init__(self, layer: nn.QuantizedLinear, policy: str):
        nn.Module.__init__(self)
        self.group_size, self.bits, self.mode, self.policy = layer.group_size, layer.bits, layer.mode, policy
        for name, value in layer.parameters().items():
            self[name] = value
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        y = FrozenMatrix.of(self, self.policy).apply(x)
        return y + self.bias if "bias" in self else y


def resolve_policy(policy: str, model: nn.Module, dtype: mx.Dtype) -> str:
    """What "auto" means here: resident on a CPU while the dense weights take at most a quarter of memory."""
    if policy != "auto" or backend.device() != "cpu":
        return policy
    layers = [m for _, m in model.named_modules() if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))]
    dense_bytes = sum(m.weight.size * 32 // m.bits * dtype.size for m in layers)
    return "resident" if dense_bytes * 4 <= backend.memory_bytes() else "dequantize"


def install(model: nn.Module, policy: str, dtype: mx.Dtype) -> None:
    """Give every quantized linear layer of `model` a policy, in place."""

    def layer(old: nn.QuantizedLinear) -> nn.Module:
        if policy != "resident":
            return FrozenQuantizedLinear(old, policy)
        matrix = FrozenMatrix.of(old, policy, dtype)
        out, columns = matrix.shape
        new = nn.Linear(columns, out, bias="bias" in old)
        new.weight = matrix.weight
        new.bits = old.bits  # what lora.rank_scaling=by_bits goes by
        mx.eval(new.weight)
        if "bias" in old:
            new.bias = old.bias
        new.freeze()
        return new

    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    changed = [(path, layer(m)) for path, m in leaves if isinstance(m, nn.QuantizedLinear)]
    model.update_modules(tree_unflatten(changed))

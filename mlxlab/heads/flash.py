"""Cross-entropy over vocabulary tiles with a running maximum and sum: an array [M, V] never exists.

The forward pass is the online softmax (Milakov and Gimelshein, 2018) applied to linear cross-entropy (Wijmans et al.,
2024): after each tile, m' = max(m, max z), s' = s exp(m - m') + sum exp(z - m'). The backward pass visits the tiles
again, recomputes their logits and adds each tile's part of the gradient in float32.

That is the portable form, in array operations: the same code on every backend and for every kind of weights. On GPUs
a kernel does the same inside one launch; it is compared with array operations before its first use on a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Iterable

import mlx.core as mx

from mlxlab import backend
from mlxlab.elementwise import exp
from mlxlab.errors import ConfigError
from mlxlab.heads import flash_check, flash_cuda, flash_metal
from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Head, Problem, Setup

FORMS = ("auto", "portable", "kernel")
KERNELS = {"metal": flash_metal, "cuda": flash_cuda}  # by the device that they run on


@dataclass(frozen=True)
class Flash(Head):
    """Memory: float32 arrays [chunk_tokens, tile_vocab], independent of V.

    Args:
        chunk_tokens: scored rows per call.
        tile_vocab: vocabulary entries whose logits exist at the same time (portable form).
        form: "auto" (a kernel where one passes its check), "portable", or "kernel" (an error without one).
    """

    chunk_tokens: int = 2048
    tile_vocab: int = 8192
    form: str = "auto"

    compiles: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "tile_vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")

    def check(self, setup: Setup) -> Iterable[Problem]:
        if self.form == "kernel" and setup.device not in KERNELS:
            yield Problem(
                f"head.form=kernel needs a GPU, and MLX computes on {setup.device} here",
                "use head.form=auto or portable",
            )

    def rows_per_call(self, rows: int) -> int:
        return min(rows, self.chunk_tokens)

    def __call__(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        step = self.rows_per_call(hidden.shape[0])
        pieces = [
            self._chunk(hidden[i : i + step], targets[i : i + step], weights) for i in range(0, hidden.shape[0], step)
        ]
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _chunk(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        kernel = self._kernel(hidden.dtype, weights)
        starts = range(0, weights.vocabulary, self.tile_vocab)

        @mx.custom_function
        def flash_cross_entropy(hidden):
            if kernel is not None:
                return list(kernel.forward(hidden, targets, weights))
            rows = hidden.shape[0]
            peak = mx.full((rows,), -mx.inf, mx.float32)
            total, target = mx.zeros((rows,), mx.float32), mx.zeros((rows,), mx.float32)
            for start in starts:
                peak, total, target = self._tile_forward(hidden, targets, weights, start, peak, total, target)
            log_sum = mx.log(total)
            return [(target - peak) - log_sum, peak, log_sum]

        @flash_cross_entropy.vjp
        def backward(primal, cotangents, outputs):
            _, peak, log_sum = outputs
            if kernel is not None:
                return kernel.backward(primal, targets, weights, cotangents[0], peak, log_sum)
            gradient = mx.zeros(primal.shape, mx.float32)
            for start in starts:
                gradient = self._tile_backward(gradient, primal, targets, weights, start, cotangents[0], peak, log_sum)
            return gradient.astype(primal.dtype)

        return flash_cross_entropy(hidden)[0]

    def _kernel(self, dtype: mx.Dtype, weights: HeadWeights) -> ModuleType | None:
        kernel = KERNELS.get(backend.device())
        if kernel is None or self.form == "portable":
            return None
        if flash_check.checked(kernel, dtype, weights):
            return kernel
        if self.form == "kernel":
            raise ConfigError(f"head.form=kernel cannot be had: {flash_check.status()[-1]} Use head.form=auto.")
        return None

    def _tile_forward(self, hidden, targets, weights, start, peak, total, target):
        z = weights.tile(start, start + self.tile_vocab).logits(hidden)
        new_peak = mx.maximum(peak, z.max(axis=-1))
        total = total * exp(peak - new_peak) + exp(z - new_peak[:, None]).sum(axis=-1)
        column, inside = self._columns(targets, start, z.shape[-1])
        picked = mx.take_along_axis(z, column[:, None], axis=-1)[:, 0]
        return new_peak, total, mx.where(inside, picked, target)

    def _tile_backward(self, gradient, hidden, targets, weights, start, cotangent, peak, log_sum):
        tile = weights.tile(start, start + self.tile_vocab)
        z = tile.logits(hidden)
        probability = exp((z - peak[:, None]) - log_sum[:, None])
        onehot = mx.arange(start, start + z.shape[-1])[None] == targets[:, None]
        at_logits = (onehot.astype(mx.float32) - probability) * cotangent[:, None]
        part = tile.backproject(at_logits, z, hidden.dtype)
        return gradient + part.astype(mx.float32)

    @staticmethod
    def _columns(targets, start, width):
        inside = (targets >= start) & (targets < start + width)
        return mx.where(inside, targets - start, 0), inside

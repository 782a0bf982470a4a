"""The walk that most families share: an embedding, a straight row of decoder layers, a norm, a projection.

mlx-lm's own layers are called as they are. The list of families is not open, though: many others differ in a scale or
a mask only, and would be silently wrong. So each family is a class that says what differs, and every load compares the
walk with the stock model (see `load.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxlab.elementwise import on_cpu, swiglu
from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Attention, Block, Constants, ModelAdapter, State
from mlxlab.linear import FrozenMatrix

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # what LoRA adapts where the feed-forward has experts

Mask = mx.array | str | None


class DecoderWalk(ModelAdapter):
    """The common walk. A family overrides what it does differently, and `windows` if a layer has one.

    Class attributes: the names that mlx-lm gives to the parts of this family's model.
    """

    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing", "half_blocks"})

    inner_name: ClassVar[str] = "model"
    embedding_name: ClassVar[str] = "embed_tokens"
    norm_name: ClassVar[str] = "norm"
    projection_name: ClassVar[str] = "lm_head"  # if the model has none, it projects with its embedding

    def __init__(self, model: nn.Module, policy: str = "auto"):
        super().__init__(model, policy)
        self.text = model.language_model if "language_model" in model else model
        self.inner = self.text[self.inner_name]
        layers = self.inner.layers
        path = next(path for path, module in model.named_modules() if module is layers[0]).removesuffix(".0")
        self._blocks = [Block(i, f"{path}.{i}", layer) for i, layer in enumerate(layers)]
        self._embedding, self._norm = self.inner[self.embedding_name], self.inner[self.norm_name]
        self._windows = self.windows()
        projection = self.text.get(self.projection_name, self._embedding)
        matrix = FrozenMatrix.of(projection, policy, self._norm.weight.dtype)
        self._head = HeadWeights(matrix, bias=projection.get("bias"), **self.logit_options())

    # ------------------------------------------------------------------------------------- what a family may override
    def windows(self) -> list[int | None]:
        """Per layer: the sliding window in tokens, or None for full attention."""
        return [None] * len(self._blocks)

    def logit_options(self) -> dict[str, float | None]:
        """`scale` and `softcap` of the logits, as in `HeadWeights`."""
        return {}

    def scale_embedding(self, h: mx.array) -> mx.array:
        """What happens to the embedding [B, T, H] before the first layer."""
        return h

    def layer(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        """One stock layer, h [B, T, H] -> [B, T, H]."""
        return layer(h, mask, cache)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        """Its first half: attention with its residual."""
        return h + layer.self_attn(layer.input_layernorm(h), mask, cache)

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        """Its second half: feed-forward with its residual."""
        return h + layer.mlp(layer.post_attention_layernorm(h))

    # -------------------------------------------------------------------------------------------------------- the walk
    def embed(self, ids: mx.array) -> tuple[State, Constants]:
        return {"h": self.scale_embedding(self._embedding(ids))}, {}

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        mask = attention.mask(self._windows[block.index])
        return {"h": self.layer(block.module, state["h"], mask, attention.cache)}

    def run_half(self, block: Block, half: int, state: State, constants: Constants, attention: Attention) -> State:
        if half == 1:
            return {"h": self.feed(block.module, state["h"])}
        mask = attention.mask(self._windows[block.index])
        return {"h": self.attend(block.module, state["h"], mask, attention.cache)}

    def finish(self, state: State) -> mx.array:
        return self._norm(state["h"])

    def head_weights(self) -> HeadWeights:
        return self._head


class SwigluWalk(DecoderWalk):
    """Pre-norm layers with a SwiGLU feed-forward, whose two halves are computed by us where that is faster."""

    compiles: ClassVar[bool] = True

    def residual(self, layer: nn.Module) -> float:
        """Multiplies what each half adds."""
        return 1.0

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        if on_cpu():  # whose SwiGLU is the faster one
            return self.run_half(block, 1, self.run_half(block, 0, state, constants, attention), constants, attention)
        return super().run(block, state, constants, attention)

    def attend(self, layer: nn.Module, h: mx.array, mask: Mask, cache: Any) -> mx.array:
        return self._add(layer, h, layer.self_attn(layer.input_layernorm(h), mask, cache))

    def feed(self, layer: nn.Module, h: mx.array) -> mx.array:
        mlp, x = layer.mlp, layer.post_attention_layernorm(h)
        return self._add(layer, h, mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x))))

    def _add(self, layer: nn.Module, h: mx.array, update: mx.array) -> mx.array:
        factor = self.residual(layer)
        return h + (update if factor == 1.0 else update * factor)


class Llama(SwigluWalk):
    """Llama and what loads as it (Mistral, SmolLM2, MiniCPM5), with optional sliding layers."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")

    def windows(self) -> list[int | None]:
        return llama_windows(self.inner)


def llama_windows(inner: nn.Module) -> list[int | None]:
    """Per layer of mlx-lm's llama and what is built on it: the sliding window, or None."""
    return [inner.sliding_window if layer.use_sliding else None for layer in inner.layers]

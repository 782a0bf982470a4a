"""Families that are an embedding, a straight row of decoder layers, a norm and a projection.

The walk is shared, the list of families is not open: many others differ in a scale or a mask only, and would be
silently wrong. Each has its own class, and every load compares the walk with the stock model (see `load.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxlab.elementwise import on_cpu, swiglu
from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Attention, Block, Constants, ModelAdapter, State
from mlxlab.linear import FrozenMatrix


class DecoderWalk(ModelAdapter):
    """The common walk; a family says which layers have a sliding window."""

    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing", "half_blocks"})

    def __init__(self, model: nn.Module, policy: str = "auto"):
        super().__init__(model, policy)
        self._windows = self.windows()
        self._blocks = [Block(i, f"model.layers.{i}", layer) for i, layer in enumerate(model.model.layers)]
        tied = model.args.tie_word_embeddings
        projection = model.model.embed_tokens if tied else model.lm_head
        matrix = FrozenMatrix.of(projection, policy, model.model.norm.weight.dtype)
        self._head = HeadWeights(matrix, bias=None if tied else projection.get("bias"))

    @abstractmethod
    def windows(self) -> list[int | None]:
        """Per layer: the sliding window in tokens, or None for full attention."""

    def embed(self, ids: mx.array) -> tuple[State, Constants]:
        return {"h": self.model.model.embed_tokens(ids)}, {}

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        if on_cpu():  # whose SwiGLU is the faster one
            return self.run_half(block, 1, self.run_half(block, 0, state, constants, attention), constants, attention)
        return {"h": block.module(state["h"], attention.mask(self._windows[block.index]), attention.cache)}

    def run_half(self, block: Block, half: int, state: State, constants: Constants, attention: Attention) -> State:
        layer, h = block.module, state["h"]
        if half == 0:
            mask = attention.mask(self._windows[block.index])
            return {"h": h + layer.self_attn(layer.input_layernorm(h), mask, attention.cache)}
        mlp, x = layer.mlp, layer.post_attention_layernorm(h)
        return {"h": h + mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))}

    def finish(self, state: State) -> mx.array:
        return self.model.model.norm(state["h"])

    def head_weights(self) -> HeadWeights:
        return self._head


class Llama(DecoderWalk):
    """Llama and what loads as it (Mistral, SmolLM2, MiniCPM5), with optional sliding layers."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")

    def windows(self) -> list[int | None]:
        inner = self.model.model
        return [inner.sliding_window if layer.use_sliding else None for layer in inner.layers]


class Qwen(DecoderWalk):
    """Qwen 2, 2.5 and 3, dense."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3")

    def windows(self) -> list[int | None]:
        return [None] * len(self.model.model.layers)

"""Gemma 4 text models: sliding and full layers, shared keys and values, per-layer inputs, softcap."""

from __future__ import annotations

from typing import ClassVar, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Attention, Block, Constants, ModelAdapter, State
from mlxlab.linear import FrozenMatrix


class Gemma4(ModelAdapter):
    """Gemma 4, text: shared keys and values, per-layer inputs, sliding layers, softcap; experts stay frozen.

    The last layers read keys and values of earlier donor layers: those ride in the state as "kv_<donor>", so that their
    gradient reaches the donor through any backward strategy. They are dropped after their last reader.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gemma4", "gemma4_text", "gemma4_unified")
    lora_targets: ClassVar[tuple[str, ...]] = (  # not the projections of the same names inside the experts
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing", "half_blocks"})

    def __init__(self, model: nn.Module, policy: str = "auto"):
        super().__init__(model, policy)
        wrapped = "language_model" in model
        text = model.language_model if wrapped else model
        prefix = "language_model.model.layers" if wrapped else "model.layers"
        self._inner = text.model
        self._blocks = [Block(i, f"{prefix}.{i}", layer) for i, layer in enumerate(self._inner.layers)]
        self._last_reader: dict[int, int] = {}
        for reader, donor in enumerate(self._inner.previous_kvs):
            if donor != reader:
                self._last_reader[donor] = reader
        projection = self._inner.embed_tokens if text.tie_word_embeddings else text.lm_head
        matrix = FrozenMatrix.of(projection, policy, self._inner.norm.weight.dtype)
        self._head = HeadWeights(matrix, softcap=text.final_logit_softcapping)

    def embed(self, ids: mx.array) -> tuple[State, Constants]:
        inner = self._inner
        embedding = inner.embed_tokens(ids)
        h = embedding * inner.embed_scale
        if not inner.hidden_size_per_layer_input:
            return {"h": h}, {}
        per_layer = inner._project_per_layer_inputs(h, inner._get_per_layer_inputs(ids, embedding))
        return {"h": h}, {"per_layer": per_layer}

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        shared = self._shared(block, state)
        h, keys_values, _ = block.module(
            state["h"],
            attention.mask(self._window(block)),
            attention.cache if shared is None else None,
            per_layer_input=self._per_layer(block, constants),
            shared_kv=shared,
            offset=attention.offset,
        )
        return self._state(block, state, h, keys_values)

    def run_half(self, block: Block, half: int, state: State, constants: Constants, attention: Attention) -> State:
        layer, h = block.module, state["h"]
        if half == 0:
            shared = self._shared(block, state)
            cache = attention.cache if shared is None else None
            mask = attention.mask(self._window(block))
            update, keys_values, _ = layer.self_attn(
                layer.input_layernorm(h), mask, cache, shared_kv=shared, offset=attention.offset
            )
            return self._state(block, state, h + layer.post_attention_layernorm(update), keys_values)
        h = h + layer.post_feedforward_layernorm(_feed_forward(layer, h))
        per_layer = self._per_layer(block, constants)
        if per_layer is not None:
            gate = nn.gelu_approx(layer.per_layer_input_gate(h)) * per_layer
            h = h + layer.post_per_layer_input_norm(layer.per_layer_projection(gate))
        return {**state, "h": h * layer.layer_scalar}

    def finish(self, state: State) -> mx.array:
        return self._inner.norm(state["h"])

    def head_weights(self) -> HeadWeights:
        return self._head

    def _window(self, block: Block) -> int | None:
        return self._inner.window_size if block.module.layer_type == "sliding_attention" else None

    def _per_layer(self, block: Block, constants: Constants) -> mx.array | None:
        return constants["per_layer"][:, :, block.index] if "per_layer" in constants else None

    def _shared(self, block: Block, state: State) -> tuple[mx.array, mx.array] | None:
        donor = self._inner.previous_kvs[block.index]
        return None if donor == block.index else state[f"kv_{donor}"]

    def _state(self, block: Block, state: State, h: mx.array, keys_values: tuple[mx.array, mx.array]) -> State:
        new = {"h": h}
        for donor, reader in self._last_reader.items():
            if donor == block.index:
                new[f"kv_{donor}"] = keys_values
            elif f"kv_{donor}" in state and reader > block.index:
                new[f"kv_{donor}"] = state[f"kv_{donor}"]
        return new


def _feed_forward(layer: nn.Module, h: mx.array) -> mx.array:
    """The dense part, and beside it the experts where there are any."""
    dense = layer.mlp(layer.pre_feedforward_layernorm(h))
    if not layer.enable_moe:
        return dense
    experts = layer.experts(layer.pre_feedforward_layernorm_2(h), *layer.router(h))
    return layer.post_feedforward_layernorm_1(dense) + layer.post_feedforward_layernorm_2(experts)

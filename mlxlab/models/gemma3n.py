"""Gemma 3n: four parallel hidden states (AltUp), per-layer inputs, keys and values shared by the last layers."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxlab.heads.weights import HeadWeights
from mlxlab.interfaces import Attention, Block, Constants, ModelAdapter, State
from mlxlab.linear import FrozenMatrix

_PATH = "model.language_model"


class Gemma3n(ModelAdapter):
    """Gemma 3n, text: AltUp, shared keys and values, per-layer inputs, softcap.

    "h" is [A, B, T, H], the A parallel states. Keys and values of the donor layers ride in the state as "kv_<donor>",
    as in Gemma 4. (mlx-lm without a cache computes keys of their own for the layers that share, unlike with one; this
    walk does what generation does.)
    """

    model_types: ClassVar[tuple[str, ...]] = ("gemma3n",)
    features: ClassVar[frozenset[str]] = frozenset({"prefix_cache", "packing"})
    lacks: ClassVar[Mapping[str, str]] = {"half_blocks": "its states are mixed before and after both halves"}

    def __init__(self, model: nn.Module, policy: str = "auto"):
        super().__init__(model, policy)
        self._text = text = model.model.language_model
        self._blocks = [Block(i, f"{_PATH}.layers.{i}", layer) for i, layer in enumerate(text.layers)]
        self._donors = list(text.layer_idx_to_cache_idx)
        self._last_reader = {donor: reader for reader, donor in enumerate(self._donors) if donor != reader}
        for layer in text.layers:
            if layer.self_attn.is_kv_shared_layer:  # in the checkpoint, but never used: no LoRA may land there
                for name in ("k_proj", "v_proj"):
                    layer.self_attn.pop(name)
        matrix = FrozenMatrix.of(text.embed_tokens, policy, text.norm.weight.dtype)
        self._head = HeadWeights(matrix, softcap=text.final_logit_softcapping)

    def embed(self, ids: mx.array) -> tuple[State, Constants]:
        text = self._text
        first = text.embed_tokens(ids) * (text.hidden_size**0.5)
        per_layer = text.project_per_layer_inputs(first, text.get_per_layer_inputs(ids))
        others = mx.stack([projection(first) for projection in text.altup_projections])
        return {"h": mx.concatenate([first[None], _with_magnitude_of(first, others)])}, {"per_layer": per_layer}

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        layer, donor = block.module, self._donors[block.index]
        keys = _SharedKV(attention.cache, None if donor == block.index else state[f"kv_{donor}"])
        mask = attention.mask(self._text.sliding_window if layer.is_sliding else None)
        per_layer = constants["per_layer"][:, :, block.index]
        new = {"h": layer(state["h"], mask, keys, per_layer, offset=attention.offset)}
        for donor, reader in self._last_reader.items():
            if donor == block.index:
                new[f"kv_{donor}"] = keys.pair
            elif f"kv_{donor}" in state and reader > block.index:
                new[f"kv_{donor}"] = state[f"kv_{donor}"]
        return new

    def finish(self, state: State) -> mx.array:
        h = state["h"]
        others = mx.stack([projection(h[i + 1]) for i, projection in enumerate(self._text.altup_unembed_projections)])
        return self._text.norm(mx.concatenate([h[:1], _with_magnitude_of(h[0], others)]).mean(axis=0))

    def head_weights(self) -> HeadWeights:
        return self._head


class _SharedKV:
    """mlx-lm's cache protocol for one call: hands out the donor's keys and values, or keeps this layer's own."""

    def __init__(self, cache: Any, pair: tuple[mx.array, mx.array] | None):
        self._cache, self.pair = cache, pair

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.pair = (keys, values) if self._cache is None else self._cache.update_and_fetch(keys, values)
        return self.pair

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.pair


def _with_magnitude_of(first: mx.array, others: mx.array) -> mx.array:
    """Scale others [A - 1, B, T, H] to the root mean square of first [B, T, H]."""
    target = mx.mean(first**2, axis=-1, keepdims=True) ** 0.5
    magnitude = mx.mean(others**2, axis=-1, keepdims=True) ** 0.5
    return others * (target / mx.maximum(magnitude, mx.finfo(first.dtype).min))

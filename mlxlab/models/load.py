"""From a checkpoint folder to a model that can be trained, checked against the stock forward pass."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxlab import backend, linear
from mlxlab.attention import StreamAttention
from mlxlab.errors import CompatError, ConfigError
from mlxlab.interfaces import ModelAdapter

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model with frozen weights, its adapter and tokenizer, and how it computes."""

    model: nn.Module
    adapter: ModelAdapter
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    dtype: str
    policy: str  # of quantized products, see mlxlab.linear


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder} is not a model folder: config.json cannot be read ({error}).") from error


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's tokenizer of a checkpoint folder; reads no weights."""
    from mlx_lm.utils import load_config, load_tokenizer

    return load_tokenizer(folder, eos_token_ids=load_config(folder).get("eos_token_id"))


def load(
    folder: Path, family: type[ModelAdapter], dtype: str = "auto", policy: str = "auto", tokenizer: Any = None
) -> LoadedModel:
    """Load weights and tokenizer through mlx-lm, choose how frozen weights are multiplied, check the adapter.

    Args:
        dtype: of activations and unquantized weights; "auto" is float32 on a CPU (where half precision is slow) and
            bfloat16 on a GPU.
        policy: for quantized weights, see `mlxlab.linear`.
        tokenizer: of this checkpoint, if it has been loaded already.

    Raises:
        CompatError: the adapter does not compute what the stock model computes.
    """
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    tokenizer = load_tokenizer(folder) if tokenizer is None else tokenizer
    if dtype == "auto":
        dtype = "float32" if backend.device() == "cpu" else "bfloat16"
    model.set_dtype(DTYPES[dtype])
    policy = linear.resolve_policy(policy, model, DTYPES[dtype])
    linear.install(model, policy, DTYPES[dtype])
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    adapter = family(model, policy)
    check_adapter(adapter, config)
    return LoadedModel(model, adapter, tokenizer, dtype, policy)


def walk(adapter: ModelAdapter, ids: mx.array) -> mx.array:
    """Logits [B, T, V] of token ids [B, T], block by block through the adapter."""
    state, constants = adapter.embed(ids)
    for block in adapter.blocks():
        state = adapter.run(block, state, constants, StreamAttention(ids.shape[1]))
    hidden = adapter.finish(state)
    return adapter.head_weights().logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*ids.shape, -1)


def check_adapter(adapter: ModelAdapter, config: Mapping[str, Any]) -> None:
    """Compare the adapter with the stock model on 16 tokens: a family that differs in one scale is caught here."""
    ids = (mx.arange(16, dtype=mx.int32) * 7 + 3)[None] % adapter.head_weights().vocabulary
    stock = adapter.model(ids).astype(mx.float32)
    ours = walk(adapter, ids)
    largest, scale = mx.abs(stock - ours).max().item(), mx.abs(stock).max().item()
    exact = stock.dtype == mx.float32 and adapter.head_weights().matrix.weight.dtype == mx.float32
    if not largest <= (1e-4 if exact else 3e-2) * scale:  # NaN fails too
        raise CompatError(
            f"adapter {type(adapter).__name__} does not reproduce model_type {config.get('model_type')!r}: largest "
            f"logit difference {largest:.3g} of {scale:.3g} on 16 tokens; training refused. Write an adapter for this "
            "family (README, 'Add a model family')."
        )

"""From a checkpoint folder to a model that can be trained, checked against the stock forward pass."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

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
    dtype = resolve_dtype(dtype)
    model.set_dtype(DTYPES[dtype])
    policy = linear.resolve_policy(policy, model, DTYPES[dtype])
    linear.install(model, policy, DTYPES[dtype])
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    adapter = family(model, policy)
    check_adapter(adapter, config)
    return LoadedModel(model, adapter, tokenizer, dtype, policy)


def resolve_dtype(dtype: str) -> str:
    """What "auto" means on this machine: half precision is slow on a CPU."""
    if dtype != "auto":
        return dtype
    return "float32" if backend.device() == "cpu" else "bfloat16"


def walk(adapter: ModelAdapter, ids: mx.array, windows: list[int | None] | None = None) -> mx.array:
    """Logits [B, T, V] of token ids [B, T], block by block through the adapter.

    Args:
        windows: gets, for each mask that a block asks for, its sliding window in tokens or None.
    """
    state, constants = adapter.embed(ids)
    for block in adapter.blocks():
        attention = _Observed(ids.shape[1])
        attention.windows = [] if windows is None else windows
        state = adapter.run(block, state, constants, attention)
    hidden = adapter.finish(state)
    return adapter.head_weights().logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*ids.shape, -1)


class _Observed(StreamAttention):
    windows: list[int | None]

    def mask(self, window: int | None = None) -> mx.array | str | None:
        self.windows.append(window)
        return super().mask(window)


def check_adapter(adapter: ModelAdapter, config: Mapping[str, Any]) -> None:
    """Compare the adapter with the stock model as it generates: a family that differs in one scale is caught here.

    Two forward passes of 16 tokens. So few do not reach the end of a window; instead, the windows that the blocks ask
    for must be the sizes of the stock model's rotating caches, where every block has a cache of its own.

    Raises:
        CompatError: they differ.
    """
    ids = (mx.arange(16, dtype=mx.int32) * 7 + 3)[None] % adapter.head_weights().vocabulary
    caches = make_prompt_cache(adapter.model)
    name = f"adapter {type(adapter).__name__} does not reproduce model_type {config.get('model_type')!r}"
    remedy = "training refused. Write an adapter for this family (README, 'Add a model family')."
    sizes = [cache.max_size if isinstance(cache, RotatingKVCache) else None for cache in caches]
    stock = adapter.model(ids, cache=caches)
    tolerance = _tolerance(stock.dtype)
    stock, windows = stock.astype(mx.float32), []
    largest = mx.abs(stock - walk(adapter, ids, windows)).max().item()
    scale = mx.abs(stock).max().item()
    if not largest <= tolerance * scale:  # NaN fails too
        raise CompatError(f"{name}: largest logit difference {largest:.3g} of {scale:.3g} on 16 tokens; {remedy}")
    if len(sizes) == len(windows) == len(adapter.blocks()):
        for number, (size, window) in enumerate(zip(sizes, windows)):
            if size is not None and size != window:
                raise CompatError(
                    f"{name}: block {number} has a window of {size} tokens there, {window} here; {remedy}"
                )


def _tolerance(dtype: mx.Dtype) -> float:
    """Of logits, relative to the largest: bfloat16 has 8 bits, and CUDA multiplies float32 in tf32 by default."""
    if dtype != mx.float32:
        return 2e-2
    return 5e-3 if backend.device() == "cuda" else 1e-4

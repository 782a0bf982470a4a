"""Tiny models with random weights and a byte-level tokenizer: for tests, and to try an idea in seconds."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxlab.interfaces import ModelSource
from mlxlab.models.cache import build_once

SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCABULARY = 288  # 256 bytes and the special tokens, rounded up to a multiple of 32
GROUP_SIZE = 32
_FORMAT = 4  # raise when the files change, so that caches are made again


def tiny_checkpoint(
    config: dict[str, Any], bits: int | tuple[int, ...] = 0, seed: int = 0, mode: str = "affine"
) -> Path:
    """Folder of a checkpoint in mlx-lm's format with random weights and the byte-level tokenizer, made once.

    Args:
        config: config.json of any family that mlx-lm knows; at least `VOCABULARY` entries.
        bits: 0 for float32 weights, or the width of quantization, group size 32; several widths take turns.
        seed: of the random weights.
        mode: of quantization, as in `mx.quantize`.
    """
    identity = json.dumps([_FORMAT, config, bits, seed, mode], sort_keys=True)
    name = f"{config['model_type']}-tiny-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return build_once(name, lambda folder: _build(folder, copy.deepcopy(config), bits, seed, mode))


@dataclass(frozen=True)
class TinySource(ModelSource):
    """Writes a checkpoint in mlx-lm's format, once per set of options.

    Args:
        bits: 0 for float32 weights, or the width of affine quantization (4 or 8), group size 32.
        seed: of the random weights.
    """

    bits: int = 0
    seed: int = 0

    config: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        if self.bits not in (0, 4, 8):
            raise ValueError(f"bits must be 0 (float32), 4 or 8, got {self.bits}")

    def folder(self) -> Path:
        return tiny_checkpoint(self.config, self.bits, self.seed)


@dataclass(frozen=True)
class TinyLlama(TinySource):
    """Five llama layers, two of them with a sliding window; untied projection.

    Args:
        bits: 0 for float32 weights, or the width of affine quantization (4 or 8), group size 32.
        seed: of the random weights.
    """

    config: ClassVar[dict[str, Any]] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "sliding_window": 12,
        "eos_token_id": 2,
    }


@dataclass(frozen=True)
class TinyGemma4(TinySource):
    """Seven Gemma 4 layers with donors of keys and values, per-layer inputs, sliding windows, softcap, tied projection.

    Args:
        bits: 0 for float32 weights, or the width of affine quantization (4 or 8), group size 32.
        seed: of the random weights.
    """

    config: ClassVar[dict[str, Any]] = {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 7,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 3,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {"rope_theta": 1000000.0},
        },
        "eos_token_id": 2,
    }


def _build(folder: Path, config: dict[str, Any], bits: int | tuple[int, ...], seed: int, mode: str) -> None:
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    model.load_weights([(path, _random(path, value, key)) for (path, value), key in zip(parameters, keys)])
    if bits:
        widths = itertools.cycle([bits] if isinstance(bits, int) else bits)
        layers = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        each = {
            path: {"group_size": GROUP_SIZE, "bits": next(widths), "mode": mode} if _can_quantize(module) else False
            for path, module in layers
            if hasattr(module, "to_quantized")
        }
        nn.quantize(model, class_predicate=lambda path, module: each.get(path, False))
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 8, "mode": mode, **each}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _tokenizer().save_pretrained(folder)


def _random(path: str, value: mx.array, key: mx.array) -> mx.array:
    """Matrices small and random, vectors near what they were (norms near 1): every parameter matters, none explodes."""
    noise = mx.random.normal(value.shape, key=key)
    if value.ndim > 1:
        return 0.15 * noise
    # normed queries and keys at half size keep a softmax without 1/sqrt(D) from being a maximum
    middle = 0.5 * value if path.endswith(("q_norm.weight", "k_norm.weight")) else value
    return middle + 0.05 * noise


def _can_quantize(module: nn.Module) -> bool:
    return module.weight.shape[-1] % GROUP_SIZE == 0


def _tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped

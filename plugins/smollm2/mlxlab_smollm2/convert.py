"""From a llama checkpoint in GGUF to a folder that mlx-lm loads, without another rounding of any weight.

Q4_1 and Q8_0 are MLX's affine quantization in groups of 32 (w = scale * q + bias), so the packed integers stay as they
are. Scales and biases stay in float16, the type they have in the file: bfloat16 has three bits of mantissa less.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Mapping

import mlx.core as mx

from mlxlab_smollm2.tokenizer import build_tokenizer

GROUP_SIZE = 32
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPECTED = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config.json, generation_config.json and the tokenizer's files into `folder`.

    Raises:
        ValueError: the file is of another architecture, or has a tensor without a place in it.
    """
    tensors, metadata = mx.load(str(gguf), format="gguf", return_metadata=True)
    for key, value in EXPECTED.items():
        if metadata.get(key) != value:
            raise ValueError(f"{gguf}: {key} must be {value!r}, got {metadata.get(key)!r}")
    heads = {
        "q": _number(metadata, "llama.attention.head_count"),
        "k": _number(metadata, "llama.attention.head_count_kv"),
    }
    weights = {}
    for gguf_name, value in tensors.items():
        name = rename(gguf_name)
        if permuted := re.search(r"self_attn\.([qk])_proj", name):
            value = unpermute(value, heads[permuted[1]])
        weights[name] = _narrow(value)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = model_config(metadata, weights)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")})
    build_tokenizer(metadata).save_pretrained(folder)


def rename(name: str) -> str:
    """`blk.3.attn_q.scales` -> `model.layers.3.self_attn.q_proj.scales`; ValueError for a name of no llama tensor."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)", name)
    module = (LAYER if match[1] else TOP).get(match[2]) if match else None
    if module is None:
        raise ValueError(f"tensor {name!r} has no place in a llama model")
    return f"model.layers.{match[1]}.{module}.{match[3]}" if match[1] else f"{module}.{match[3]}"


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Rows of a q or k projection from GGUF's order to that of mlx-lm, for weights, scales and biases alike.

    In a head of D rows, GGUF puts the two rows that rotate together side by side (0, D/2, 1, D/2 + 1, ...); mlx-lm
    wants first halves, then second halves (0, 1, ..., D/2, D/2 + 1, ...).

    Args:
        rows: [heads * D, columns].
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def model_config(metadata: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """config.json for mlx-lm: a llama model, and how each of its matrices is quantized."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata, "llama.embedding_length"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": _number(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        # stored as float32: six digits give back the decimal number it was made from
        "rms_norm_eps": float(f"{_number(metadata, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _number(metadata, "llama.rope.freq_base"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _number(metadata, "tokenizer.ggml.padding_token_id"),
    }
    bits = {}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            path = name.removesuffix(".scales")
            # a group of 32 weights fills as many 32-bit words as each weight has bits
            bits[path] = weights[f"{path}.weight"].shape[-1] // scales.shape[-1]
    if bits:
        usual = min(bits.values())
        others = {path: {"group_size": GROUP_SIZE, "bits": n} for path, n in sorted(bits.items()) if n != usual}
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine", **others}
    return config


def _narrow(value: mx.array) -> mx.array:
    """float32 as float16 where that loses nothing (all norms), so that a model with float16 scales is all float16."""
    if value.dtype != mx.float32:
        return value
    half = value.astype(mx.float16)
    return half if mx.array_equal(half.astype(mx.float32), value) else value


def _number(metadata: Mapping[str, Any], key: str) -> int | float:
    return metadata[key].item()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""A tiny config.json of every model_type, with each quirk of its family: windows shorter than the tests' sequences,
layers of both kinds, multipliers unlike 1, several experts."""

from __future__ import annotations

from typing import Any

from mlxlab.models.tiny import VOCABULARY, TinyGemma4

WINDOW = 6
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING = {"layer_types": _LAYERS, "sliding_window": WINDOW}
_GRANITE = {
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_bias": False,
    "mlp_bias": False,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
_LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5] * 4}
_MINICPM = {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 3.0}
_MINISTRAL = {
    "rope_parameters": {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
}
_GEMMA3 = {"query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2}


def _config(model_type: str, *quirks: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"model_type": model_type, **_COMMON}
    for quirk in (*quirks, more):
        config |= quirk
    return config


def _inside(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": model_type, "text_config": text, "vocab_size": VOCABULARY, "eos_token_id": 2}


TINY: dict[str, dict[str, Any]] = {
    "llama": _config("llama", _SLIDING, attention_bias=True),
    "mistral": _config("mistral", tie_word_embeddings=True),
    "qwen2": _config("qwen2", tie_word_embeddings=True),
    "qwen3": _config("qwen3"),
    "qwen2_moe": _config("qwen2_moe", _QWEN_EXPERTS, rope_traditional=False),
    "qwen3_moe": _config("qwen3_moe", _QWEN_EXPERTS),
    "qwen3_next": _config(
        "qwen3_next",
        _QWEN_EXPERTS,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        partial_rotary_factor=0.5,
        full_attention_interval=3,
    ),
    "ministral3": _config("ministral3", _SLIDING, _MINISTRAL),
    "mistral3": _inside("mistral3", _config("mistral", _SLIDING)),
    "mistral3 with ministral3": _inside("mistral3", _config("ministral3", _SLIDING, _MINISTRAL)),
    "mixtral": _config("mixtral", _EXPERTS),
    "gemma": _config("gemma"),
    "gemma2": _config("gemma2", query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3_text": _config("gemma3_text", _GEMMA3),
    "gemma3": _inside("gemma3", _config("gemma3_text", _GEMMA3)),
    "gemma3n": _inside(
        "gemma3n",
        _config(
            "gemma3n_text",
            num_hidden_layers=6,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=3,
            sliding_window=WINDOW,
            vocab_size_per_layer_input=VOCABULARY - 8,
            hidden_size_per_layer_input=32,
            rope_local_base_freq=1000.0,
            final_logit_softcapping=5.0,
            activation_sparsity_pattern=[0.5, 0.0] * 3,
            altup_num_inputs=3,
            altup_coef_clip=0.2,
            altup_correct_scale=True,
            altup_active_idx=0,
            laurel_rank=32,
        ),
    ),
    "gemma4_text": {**TinyGemma4.config, "sliding_window": WINDOW},
    "gemma4": _inside(
        "gemma4",
        {
            **TinyGemma4.config,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4_unified": _inside("gemma4_unified", {**TinyGemma4.config, "use_double_wide_mlp": False}),
    "phi": _config("phi", layer_norm_eps=1e-5, partial_rotary_factor=0.5),
    "phi3": _config("phi3", partial_rotary_factor=0.5, rope_scaling=_LONG_ROPE, original_max_position_embeddings=64),
    "phimoe": _config("phimoe", _EXPERTS),
    "smollm3": _config("smollm3", no_rope_layer_interval=2, tie_word_embeddings=True),
    "llama4_text": _config("llama4_text", intermediate_size_mlp=96, no_rope_layers=[1, 0, 1], use_qk_norm=True),
    "granite": _config("granite", _GRANITE, tie_word_embeddings=True),
    "granitemoe": _config("granitemoe", _GRANITE, _EXPERTS),
    "olmo2": _config("olmo2"),
    "olmo3": _config("olmo3", _SLIDING),
    "cohere": _config("cohere", logit_scale=0.25, use_qk_norm=True, layer_norm_bias=True),
    "cohere2": _config("cohere2", logit_scale=0.25, sliding_window=WINDOW, sliding_window_pattern=2),
    "minicpm": _config("minicpm", _MINICPM),
    "minicpm3": _config(
        "minicpm3",
        _MINICPM,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        rope_scaling={"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.5] * 4},
    ),
    "gpt_oss": _config(
        "gpt_oss",
        _SLIDING,
        _EXPERTS,
        intermediate_size=64,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16},
    ),
    "glm4": _config("glm4", attention_bias=True, partial_rotary_factor=0.5),
    "falcon_h1": _config(
        "falcon_h1",
        tie_word_embeddings=True,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        mamba_rms_norm=True,
    ),
    "lfm2": _config(
        "lfm2",
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=96,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        full_attn_idxs=[1],
    ),
    "mamba2": _config(
        "mamba2",
        expand=1,
        num_heads=4,
        head_dim=16,
        state_size=16,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=2,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.0, 100.0],
        time_step_rank="auto",
    ),
}

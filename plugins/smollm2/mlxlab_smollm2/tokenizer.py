"""A byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any, Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = 3  # in GGUF's token_type: tokens such as <|im_start|>, never made from text by merges


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM's tokenizer: digits one by one, then GPT-2's words, bytes and merges; with the chat template.

    Args:
        metadata: of the GGUF file, as `mx.load` returns it.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["llama.context_length"].item(),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()] for name, key in special.items()},
    )
    wrapped.chat_template = metadata["tokenizer.chat_template"]
    return wrapped

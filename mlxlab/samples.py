"""Text generated from fixed prompts, to see what training changed."""

from __future__ import annotations

from typing import Any, Sequence

import mlx.nn as nn


def prompts_of(examples: Sequence[Any], branch: str, count: int) -> list[list[int]]:
    """Token ids of the prompts of the first `count` examples that have one."""
    prompts: list[list[int]] = []
    for number in range(len(examples)):
        if len(prompts) == count:
            break  # no row is read that is not needed
        sequence = examples[number].branches[branch]
        if length := int(sequence.response.argmax()):
            prompts.append([int(i) for i in sequence.ids[:length]])
    return prompts


def generate(model: nn.Module, tokenizer: Any, prompt: Sequence[int], max_tokens: int) -> str:
    """The greedy continuation of `prompt`, through mlx-lm's own generation and the model as it is now."""
    from mlx_lm.generate import stream_generate

    return "".join(
        piece.text for piece in stream_generate(model, tokenizer, list(prompt), max_tokens=max_tokens)
    ).strip()

"""Checks that every component must pass; public, so that plugins can run them on their own.

from mlxlab.testing import parity, random_examples

loss_difference, gradient_difference = parity(adapter, lora, method, head, backward, layout, batch)
"""

from __future__ import annotations

from typing import Sequence

import mlx.core as mx
import numpy as np

from mlxlab.engine import StepEngine
from mlxlab.heads.naive import Naive
from mlxlab.interfaces import (
    Backward,
    Example,
    Head,
    Layout,
    Method,
    ModelAdapter,
    Params,
    StepResult,
    TokenSequence,
    Totals,
)
from mlxlab.lora import Lora
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.layouts.separate import Separate
from mlxlab.settings import ATTENTION_FORMS


def random_examples(method: Method, vocabulary: int, rows: int = 2, seed: int = 0) -> list[Example]:
    """Random token sequences of unequal lengths; the branches of a row share their prompt."""
    rng = np.random.default_rng(seed)
    examples = []
    for row in range(rows):
        prompt = rng.integers(0, vocabulary, 13 + 2 * row)
        branches = {}
        for number, branch in enumerate(method.branches):
            response = rng.integers(0, vocabulary, 5 + 4 * number + 3 * row)
            ids = np.concatenate([prompt, response]).astype(np.int32)
            branches[branch] = TokenSequence(ids, np.arange(len(ids)) >= len(prompt))
        examples.append(Example(branches, f"random:{row}"))
    return examples


def randomize(lora: Lora, seed: int = 0) -> None:
    """Random values for every trainable leaf: with the zeros of a fresh LoRA, half of all gradients would be zero."""
    params = lora.params()
    keys = mx.random.split(mx.random.key(seed), len(params))
    lora.update({name: 0.1 * mx.random.normal(p.shape, key=key) for (name, p), key in zip(params.items(), keys)})


def relative_difference(gradients: Params, reference: Params) -> float:
    """Norm of the difference over all leaves together, relative to the norm of the reference."""
    assert gradients.keys() == reference.keys(), "gradients of other leaves"
    square = lambda tree: sum(mx.square(value.astype(mx.float32)).sum().item() for value in tree.values())
    norm = square(reference)
    assert norm > 0, "the reference gradient is zero"
    return (square({name: gradients[name] - reference[name] for name in reference}) / norm) ** 0.5


def reference_step(adapter: ModelAdapter, lora: Lora, method: Method, batch: Sequence[Example]) -> StepResult:
    """Loss and gradients with no strategy, separate streams, full logits and MLX's own attention."""
    engine = StepEngine(adapter, lora, method, Naive(), Plain(), Separate(), "fused")
    return engine.step(batch, Totals.of(batch, method.spans()))


def parity(
    adapter: ModelAdapter,
    lora: Lora,
    method: Method,
    head: Head,
    backward: Backward,
    layout: Layout,
    batch: Sequence[Example],
    reference: StepResult | None = None,
    attention: str = ATTENTION_FORMS[0],
) -> tuple[float, float]:
    """Absolute difference of the loss and relative difference of the gradients against `reference_step`."""
    reference = reference or reference_step(adapter, lora, method, batch)
    engine = StepEngine(adapter, lora, method, head, backward, layout, attention)
    result = engine.step(batch, Totals.of(batch, method.spans()))
    loss = abs(result.loss.item() - reference.loss.item())
    return loss, relative_difference(result.grads, reference.grads)

"""Gradient checkpointing (Chen et al., 2016): keep what enters each stage, recompute what happens inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import mlx.core as mx

from mlxlab.interfaces import Backward, Params, Problem, Setup, StepResult
from mlxlab.program import Program, evaluate, through_head


GRANULARITIES = ("block", "half")


@dataclass(frozen=True)
class Checkpoint(Backward):
    """Memory: one carry per stage, plus the activations of one stage. One extra forward pass.

    Args:
        granularity: "block", or "half" for two stages per layer (attention, feed-forward): half the activations at
            a time, twice the carries.
    """

    granularity: str = "block"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}")

    @property
    def granularity_of_stages(self) -> str:
        return self.granularity

    def check(self, setup: Setup) -> Iterable[Problem]:
        family = setup.family
        if self.granularity == "half" and family is not None and "half_blocks" not in family.features:
            yield Problem(
                f"memory.granularity=half needs the model feature half_blocks, which family {family.__name__} lacks",
                "use memory=checkpoint, whose stages are whole blocks",
            )

    def __call__(self, program: Program, params: Params) -> StepResult:
        result = {}

        def whole(params):
            ends = []
            for chain in program.chains:
                carry = chain.start
                for stage in chain.stages:
                    # the wrapper lives for this call only: nothing is patched, nothing piles up between runs
                    carry = mx.checkpoint(stage.function)({name: params[name] for name in stage.parameters}, carry)
                ends.append(carry)
            hidden = evaluate(program.gather(ends))
            # The head runs on evaluated rows, piece by piece, and hands its gradient back to the graph of the blocks.
            result["loss"], result["metrics"], gradient = through_head(program, mx.stop_gradient(hidden))
            return (hidden.astype(mx.float32) * gradient.astype(mx.float32)).sum()

        grads = mx.grad(whole)(params)
        mx.eval(grads)
        return StepResult(result["loss"], result["metrics"], grads)

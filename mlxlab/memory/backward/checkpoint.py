"""Gradient checkpointing (Chen et al., 2016): keep what enters each stage, recompute what happens inside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Iterable

import mlx.core as mx

from mlxlab.interfaces import GRANULARITIES, Backward, Params, Problem, Setup, StepResult
from mlxlab.program import Program


@dataclass(frozen=True)
class Checkpoint(Backward):
    """Memory: one carry per stage, plus the activations of one stage. One extra forward pass.

    All of it is one lazy graph, which a device that runs behind the host may hold more of at once than it needs;
    memory=segmented is evaluated piece by piece and keeps its bound there.

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
                f"memory.granularity=half {family.without('half_blocks')}",
                "use memory=checkpoint, whose stages are whole blocks",
            )

    def __call__(self, program: Program, params: Params) -> StepResult:
        def whole(params):
            ends = []
            for chain in program.chains:
                carry = chain.start
                for stage in chain.stages:
                    # The wrapper lives for this call only: nothing is patched, nothing piles up between runs.
                    # Constants are captured: integers cannot be inputs of a checkpoint.
                    function = partial(stage.function, constants=chain.constants)
                    carry = mx.checkpoint(function)({name: params[name] for name in stage.parameters}, carry)
                ends.append(carry)
            return program.loss(program.score(program.gather(ends), program.targets))

        (loss, metrics), grads = mx.value_and_grad(whole)(params)
        mx.eval(loss, metrics, grads)
        return StepResult(loss, metrics, grads)

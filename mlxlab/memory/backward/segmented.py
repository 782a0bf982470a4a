"""Segmented backpropagation: the whole stack is never differentiated at once.

Forward: run the segments one after the other and keep only the edges between them. Backward: from the top down, one
vector-Jacobian product per segment, evaluated before the next begins, so that a segment's activations are freed even
where the device runs behind the host. One extra forward pass in total, whatever the number of segments.

With half blocks a segment goes back in steps: run its stages once more, keep what enters each, then one product per
stage. So the largest thing alive is half a block instead of a segment, for less than a second extra forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Iterable, Sequence

import mlx.core as mx

from mlxlab.interfaces import GRANULARITIES, Backward, Params, Problem, Setup, StepResult
from mlxlab.program import (
    Carry,
    Chain,
    Pace,
    Program,
    StreamConstants,
    evaluate,
    leaves,
    parameters_of,
    refill,
    run,
    through_head,
)


@dataclass(frozen=True)
class Segmented(Backward):
    """Memory: one carry per segment, plus the activations of one segment (or the carries inside it and half a block).

    Args:
        segment_layers: decoder layers per segment, >= 1; the last segment may be shorter.
        granularity: "block": a segment is differentiated at once; "half": half a layer at a time.
    """

    segment_layers: int = 2
    granularity: str = "block"

    def __post_init__(self) -> None:
        if self.segment_layers < 1:
            raise ValueError(f"segment_layers must be >= 1, got {self.segment_layers}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}")

    @property
    def granularity_of_stages(self) -> str:
        return self.granularity

    def check(self, setup: Setup) -> Iterable[Problem]:
        family = setup.family
        if self.granularity == "half" and family is not None and "half_blocks" not in family.features:
            yield Problem(f"memory.granularity=half {family.without('half_blocks')}", "use memory.granularity=block")

    def __call__(self, program: Program, params: Params) -> StepResult:
        pace, walks = Pace(), []
        halves = self.granularity == "half"
        size = self.segment_layers * (2 if halves else 1)
        for chain in program.chains:
            segments = [_Segment(chain, i, i + size, program) for i in range(0, len(chain.stages), size)]
            edges = [chain.start]
            for segment in segments:
                edges.append(pace(segment.forward(params, edges[-1], chain.constants)))
            walks.append((segments, edges))

        ends = [edges.pop() for _, edges in walks]
        loss, metrics, gradient = through_head(program, evaluate(program.gather(ends)))
        cotangents = _through_gather(program, ends, gradient)
        del ends, gradient

        grads: Params = {}
        for chain, (segments, edges) in zip(program.chains, walks):
            cotangent = cotangents.pop(0)
            while segments:
                # lists are popped, not indexed: an edge must be gone when the next segment runs
                steps, inner = segments.pop().steps(halves), [edges.pop()]
                for step in steps[:-1]:
                    inner.append(pace(step.forward(params, inner[-1], chain.constants)))
                while steps:
                    new, cotangent = steps.pop().backward(params, inner.pop(), cotangent, chain.constants)
                    grads |= {name: grads[name] + value if name in grads else value for name, value in new.items()}
                    pace(([grads[name] for name in new], cotangent))
        return StepResult(loss, metrics, evaluate({name: grads[name] for name in params}))


class _Segment:
    """Some stages in a row, forward and backward, compiled where that pays."""

    def __init__(self, chain: Chain, start: int, stop: int, program: Program):
        self._chain, self._program, self._range = chain, program, range(len(chain.stages))[start:stop]
        self._stages = chain.stages[start:stop]
        key = tuple(stage.key for stage in self._stages)
        self._run = program.compile(("forward", key), partial(run, self._stages))
        self._vjp = self._gradients
        if len(chain.start) == 1:
            # mx.compile's search for what to fuse takes minutes for the backward pass of streams that share keys
            self._vjp = program.compile(("backward", key), self._gradients)

    def steps(self, single: bool) -> list[_Segment]:
        """The parts that are differentiated one after the other: this segment, or each of its stages."""
        return [_Segment(self._chain, i, i + 1, self._program) for i in self._range] if single else [self]

    def forward(self, params: Params, carry: Carry, constants: StreamConstants) -> Carry:
        return self._run(parameters_of(self._stages, params), carry, constants)

    def backward(
        self, params: Params, edge: Carry, cotangent: Carry, constants: StreamConstants
    ) -> tuple[Params, Carry]:
        """Gradients of the segment's parameters, and the cotangent at its lower edge."""
        return self._vjp(parameters_of(self._stages, params), edge, cotangent, constants)

    def _gradients(self, params, edge, cotangent, constants):
        names = list(params)

        def function(*flat):
            carry = refill(edge, flat[len(names) :])
            return leaves(run(self._stages, dict(zip(names, flat)), carry, constants))

        _, results = mx.vjp(function, [*params.values(), *leaves(edge)], leaves(cotangent))
        return dict(zip(names, results)), refill(edge, results[len(names) :])


def _through_gather(program: Program, ends: Sequence[Carry], gradient: mx.array) -> list[Carry]:
    """Gradient at the scored rows -> gradient at the ends of the chains."""
    _, cotangents = mx.vjp(lambda *flat: program.gather(refill(ends, flat)), leaves(ends), [gradient])
    return refill(ends, evaluate(cotangents))

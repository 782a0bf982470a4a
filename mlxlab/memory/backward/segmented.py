"""Segmented backpropagation: the whole stack is never differentiated at once.

Forward: run the segments one after the other and keep only the edges between them. Backward: from the top down, one
vector-Jacobian product per segment, evaluated before the next begins, so that a segment's activations are freed even
where the device runs behind the host. One extra forward pass in total, whatever the number of segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import mlx.core as mx

from mlxlab.interfaces import Backward, Params, StepResult
from mlxlab.program import Carry, Program, Stage, evaluate, leaves, refill, run, through_head


@dataclass(frozen=True)
class Segmented(Backward):
    """Memory: one carry per segment, plus the activations of one segment.

    Args:
        segment_layers: decoder layers per segment, >= 1; the last segment may be shorter.
    """

    segment_layers: int = 2

    def __post_init__(self) -> None:
        if self.segment_layers < 1:
            raise ValueError(f"segment_layers must be >= 1, got {self.segment_layers}")

    def __call__(self, program: Program, params: Params) -> StepResult:
        walks = []
        for chain in program.chains:
            segments = [
                chain.stages[i : i + self.segment_layers] for i in range(0, len(chain.stages), self.segment_layers)
            ]
            edges = [chain.start]
            for segment in segments:
                edges.append(evaluate(run(segment, params, edges[-1])))
            walks.append((segments, edges))

        ends = [edges.pop() for _, edges in walks]
        hidden = evaluate(program.gather(ends))
        loss, metrics, gradient = through_head(program, hidden)
        del hidden
        form = list(ends)
        _, cotangents = mx.vjp(lambda *flat: program.gather(refill(form, flat)), leaves(ends), [gradient])
        cotangents = refill(form, evaluate(cotangents))
        del ends, form, gradient

        grads: Params = {}
        for (segments, edges), cotangent in zip(walks, cotangents):
            while segments:
                # lists are popped, not indexed: an edge must be gone when the next segment runs
                segment_grads, cotangent = _backward(segments.pop(), params, edges.pop(), cotangent)
                for name, value in segment_grads.items():
                    grads[name] = grads[name] + value if name in grads else value
                mx.eval(grads)
        return StepResult(loss, metrics, {name: grads[name] for name in params})


def _backward(segment: Sequence[Stage], params: Params, edge: Carry, cotangent: Carry) -> tuple[Params, Carry]:
    """Gradients of the segment's parameters, and the cotangent at its lower edge."""
    names = sorted({name for stage in segment for name in stage.parameters})

    def function(*flat):
        carry = refill(edge, flat[len(names) :])
        return leaves(run(segment, dict(zip(names, flat)), carry))

    _, results = mx.vjp(function, [params[name] for name in names] + leaves(edge), leaves(cotangent))
    evaluate(results)
    return dict(zip(names, results)), refill(edge, results[len(names) :])

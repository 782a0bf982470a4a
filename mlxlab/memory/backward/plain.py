"""No strategy: one graph, every activation kept. The reference for every other one."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxlab.interfaces import Backward, Params, StepResult
from mlxlab.program import Program, run


@dataclass(frozen=True)
class Plain(Backward):
    """Ordinary backpropagation."""

    def __call__(self, program: Program, params: Params) -> StepResult:
        def whole(params):
            ends = [run(chain.stages, params, chain.start, chain.constants) for chain in program.chains]
            return program.loss(program.score(program.gather(ends), program.targets))

        (loss, metrics), grads = mx.value_and_grad(whole)(params)
        mx.eval(loss, metrics, grads)
        return StepResult(loss, metrics, grads)

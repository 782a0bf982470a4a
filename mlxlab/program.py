"""A training step as data: chains of stages, then the scored rows, then a loss.

    ids -> embed -> [stage, stage, ...] -> gather rows -> score (head) -> loss (method)

A backward strategy is a way to run this line and to go back along it. Rules that every strategy and stage keeps:

1. Names inside a carry have no dots: MLX's tree functions use dots as path separators.
2. A function under `mx.vjp` never returns the direct result of `stop_gradient`: MLX drops such outputs and shifts the
   cotangents of the others. Constants therefore stay outside of the carry.
3. Integer and boolean arrays are captured, never passed through `mx.checkpoint` or `mx.vjp` as inputs.
4. Trainable leaves are explicit inputs of each stage, and the modules are restored afterwards.
5. Random numbers need explicit keys, or a recomputation draws different ones.
6. Loss and gradients are evaluated together, and edges are dropped as soon as they have been used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxlab.interfaces import Constants, Metrics, Params, State

Carry = dict[str, State]  # stream name -> state
StreamConstants = dict[str, Constants]  # stream name -> constants


@dataclass(frozen=True)
class Stage:
    """A block (or half of one) applied to the streams of one group.

    Args:
        key: equal for stages that do the same with arrays of other values or rows; identifies compiled forms.
        parameters: names of the trainable leaves that it reads.
        function: (parameters, carry, constants) -> carry; pure.
    """

    key: Hashable
    parameters: tuple[str, ...]
    function: Callable[[Params, Carry, StreamConstants], Carry]


@dataclass(frozen=True)
class Chain:
    """One group of streams from its embeddings through all stages."""

    start: Carry
    constants: StreamConstants
    stages: Sequence[Stage]


@dataclass(frozen=True)
class Program:
    """One micro-batch, ready to run.

    Args:
        chains: independent groups.
        gather: end carries of all chains -> final-normed hidden rows [M, H].
        score: (hidden rows [m, H], their targets [m]) -> log-probabilities, float32 [m]; the head.
        targets: of all rows, int32 [M].
        rows_per_call: how many rows to pass to `score` when evaluating piece by piece.
        loss: log-probabilities [M] -> (loss, metrics).
        linear: the gradient of `loss` does not depend on the log-probabilities.
        compile: (key, function) -> a compiled form of the function where that pays; equal keys share one.
        compile_head: the same for functions that call `score`.
    """

    chains: Sequence[Chain]
    gather: Callable[[Sequence[Carry]], mx.array]
    score: Callable[[mx.array, mx.array], mx.array]
    targets: mx.array
    rows_per_call: int
    loss: Callable[[mx.array], tuple[mx.array, Metrics]]
    linear: bool = False
    compile: Callable[[Hashable, Callable], Callable] = lambda key, function: function
    compile_head: Callable[[Hashable, Callable], Callable] = lambda key, function: function

    def pieces(self) -> list[slice]:
        """Ranges of rows, each small enough for one call of the head."""
        rows = self.targets.shape[0]
        return [slice(i, min(i + self.rows_per_call, rows)) for i in range(0, rows, self.rows_per_call)]


def parameters_of(stages: Sequence[Stage], params: Params) -> Params:
    """The leaves that some stages read."""
    names = dict.fromkeys(name for stage in stages for name in stage.parameters)
    return {name: params[name] for name in names}


def run(stages: Sequence[Stage], params: Params, carry: Carry, constants: StreamConstants) -> Carry:
    """Carry after some stages."""
    for stage in stages:
        carry = stage.function({name: params[name] for name in stage.parameters}, carry, constants)
    return carry


def evaluate(tree):
    """Compute all arrays of a tree now, which also cuts them from the graph they came from."""
    mx.eval(tree)
    return tree


class Pace:
    """Evaluates one piece of work after the other, and lets the host prepare the next one meanwhile.

    Without it the host would run ahead, and all pieces would have their memory at once; with a plain `mx.eval` per
    piece the device would wait for the host each time.
    """

    def __init__(self) -> None:
        self._running = None

    def __call__(self, tree):
        """Wait for the piece before, then start this one (built, but not computed); returns it."""
        mx.eval(self._running)
        mx.async_eval(tree)
        self._running = tree
        return tree


def forward(program: Program, params: Params) -> mx.array:
    """Log-probabilities [M] without gradient, evaluated stage by stage and piece by piece."""
    pace, ends = Pace(), []
    for chain in program.chains:
        carry = chain.start
        for stage in chain.stages:
            carry = pace(run([stage], params, carry, chain.constants))
        ends.append(carry)
    hidden = evaluate(program.gather(ends))
    del ends, carry
    return evaluate(mx.concatenate([pace(program.score(hidden[p], program.targets[p])) for p in program.pieces()]))


def through_head(program: Program, hidden: mx.array) -> tuple[mx.array, Metrics, mx.array]:
    """Loss, metrics and the gradient at the hidden rows [M, H], with at most one piece of logits alive at a time.

    Every piece is evaluated before the next is built: inside one lazy graph a device that runs behind the host would
    keep them all. Where the gradient of the loss is known in advance, one visit of each piece gives both.
    """
    pieces, targets = program.pieces(), program.targets
    value_and_cotangent = mx.value_and_grad(program.loss)

    def both(hidden, targets, cotangent):
        logp, gradient = mx.vjp(lambda h: program.score(h, targets), [hidden], [cotangent])
        return logp[0], gradient[0]

    pace, both = Pace(), program.compile_head("score and gradient", both)
    if program.linear:
        _, cotangent = value_and_cotangent(mx.zeros(targets.shape, mx.float32))
        visits = [pace(both(hidden[p], targets[p], cotangent[p])) for p in pieces]
        logps, gradients = zip(*visits)
        loss, metrics = program.loss(mx.concatenate(logps))
    else:
        score = program.compile_head("score", program.score)
        logps = [pace(score(hidden[p], targets[p])) for p in pieces]
        (loss, metrics), cotangent = evaluate(value_and_cotangent(mx.concatenate(logps)))
        gradients = [pace(both(hidden[p], targets[p], cotangent[p])[1]) for p in pieces]
    return evaluate((loss, metrics, mx.concatenate(gradients)))


def leaves(tree) -> list[mx.array]:
    """The arrays of a tree, in the order of `tree_flatten`."""
    return [value for _, value in tree_flatten(tree)]


def refill(tree, values: Sequence[mx.array]):
    """A tree of the same form with other arrays; the inverse of `leaves`."""
    iterator = iter(values)
    return tree_map(lambda _: next(iterator), tree)

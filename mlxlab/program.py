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
from typing import Callable, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxlab.interfaces import Metrics, Params, State

Carry = dict[str, State]  # stream name -> state


@dataclass(frozen=True)
class Stage:
    """A block (or half of one) applied to the streams of one group.

    Args:
        parameters: names of the trainable leaves that it reads.
        function: (parameters, carry) -> carry; pure.
    """

    parameters: tuple[str, ...]
    function: Callable[[Params, Carry], Carry]

    def __call__(self, params: Params, carry: Carry) -> Carry:
        return self.function({name: params[name] for name in self.parameters}, carry)


@dataclass(frozen=True)
class Chain:
    """One group of streams from its embeddings through all stages."""

    start: Carry
    stages: Sequence[Stage]


@dataclass(frozen=True)
class Program:
    """One micro-batch, ready to run.

    Args:
        chains: independent groups.
        gather: end carries of all chains -> final-normed hidden rows [M, H].
        score: (hidden rows [start:stop], start) -> log-probabilities of those rows, float32; calls the head.
        rows: M.
        rows_per_call: how many rows to pass to `score` when evaluating piece by piece.
        loss: log-probabilities [M] -> (loss, metrics).
    """

    chains: Sequence[Chain]
    gather: Callable[[Sequence[Carry]], mx.array]
    score: Callable[[mx.array, int], mx.array]
    rows: int
    rows_per_call: int
    loss: Callable[[mx.array], tuple[mx.array, Metrics]]

    def pieces(self) -> list[slice]:
        """Ranges of rows, each small enough for one call of the head."""
        return [slice(i, min(i + self.rows_per_call, self.rows)) for i in range(0, self.rows, self.rows_per_call)]


def run(stages: Sequence[Stage], params: Params, carry: Carry) -> Carry:
    for stage in stages:
        carry = stage(params, carry)
    return carry


def evaluate(tree):
    """Compute all arrays of a tree now, which also cuts them from the graph they came from."""
    mx.eval(tree)
    return tree


def forward(program: Program, params: Params) -> mx.array:
    """Log-probabilities [M] without gradient, evaluated stage by stage and piece by piece."""
    ends = []
    for chain in program.chains:
        carry = chain.start
        for stage in chain.stages:
            carry = evaluate(stage(params, carry))
        ends.append(carry)
    hidden = evaluate(program.gather(ends))
    del ends, carry
    logps = [evaluate(program.score(hidden[piece], piece.start)) for piece in program.pieces()]
    return mx.concatenate(logps)


def through_head(program: Program, hidden: mx.array) -> tuple[mx.array, Metrics, mx.array]:
    """Loss, metrics and the gradient at the hidden rows [M, H], with at most one piece of logits alive at a time.

    Every piece is evaluated before the next is built: inside one lazy graph a GPU would run ahead and keep them all.
    """
    pieces = program.pieces()
    logps = [evaluate(program.score(hidden[piece], piece.start)) for piece in pieces]
    (loss, metrics), cotangent = mx.value_and_grad(program.loss)(mx.concatenate(logps))
    evaluate([loss, metrics, cotangent])
    gradients = []
    for piece in pieces:
        start = piece.start
        _, gradient = mx.vjp(lambda h, start=start: program.score(h, start), [hidden[piece]], [cotangent[piece]])
        gradients.append(evaluate(gradient[0]))
    return loss, metrics, mx.concatenate(gradients)


def leaves(tree) -> list[mx.array]:
    """The arrays of a tree, in the order of `tree_flatten`."""
    return [value for _, value in tree_flatten(tree)]


def refill(tree, values: Sequence[mx.array]):
    """A tree of the same form with other arrays; the inverse of `leaves`."""
    iterator = iter(values)
    return tree_map(lambda _: next(iterator), tree)

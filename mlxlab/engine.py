"""One training step: batch and axes in; loss, metrics and gradients out.

The only module that knows every axis, and it asks none of them for its name. It turns a batch into a `Program`
(streams through blocks, scored rows through the head, log-probabilities through the method) and hands that to the
backward strategy.
"""

from __future__ import annotations

from typing import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlxlab.attention import CaptureKV, PrefixKV, StreamAttention
from mlxlab.interfaces import (
    Backward,
    Block,
    Constants,
    Example,
    Head,
    Layout,
    Method,
    Metrics,
    ModelAdapter,
    Params,
    Scores,
    StepResult,
    Stream,
    StreamPlan,
    TokenLogps,
    Totals,
)
from mlxlab.lora import Lora
from mlxlab.program import Carry, Chain, Program, Stage, evaluate, forward

_HALVES = {"block": (None,), "half": (0, 1)}


class StepEngine:
    """Assembles the training step from whatever was chosen.

    Args:
        adapter: walks the model block by block.
        lora: the trainable leaves inside it.
        method, head, backward, layout: the chosen components.
    """

    def __init__(
        self, adapter: ModelAdapter, lora: Lora, method: Method, head: Head, backward: Backward, layout: Layout
    ):
        self.adapter, self.lora = adapter, lora
        self.method, self.head, self.backward, self.layout = method, head, backward, layout

    def step(self, batch: Sequence[Example], totals: Totals, key: mx.array | None = None) -> StepResult:
        """Evaluated loss, metrics and gradients of a micro-batch, as shares of an update with `totals`.

        Args:
            key: random key of this micro-batch for dropout; None for no dropout.
        """
        plan = self.layout.plan(batch, self.method.spans())
        reference = self._reference(plan, totals)
        return self.backward(self._program(plan, totals, reference, key), self.lora.params())

    def evaluate(self, batch: Sequence[Example], totals: Totals) -> tuple[mx.array, Metrics]:
        """Evaluated loss and metrics through the same layout and head, without gradient or dropout."""
        plan = self.layout.plan(batch, self.method.spans())
        reference = self._reference(plan, totals)
        program = self._program(plan, totals, reference, None)
        return evaluate(program.loss(forward(program, self.lora.params())))

    def _reference(self, plan: StreamPlan, totals: Totals) -> Scores | None:
        if not self.method.needs_reference:
            return None
        program = self._program(plan, totals, None, None)
        with self.lora.disabled():
            logps = forward(program, self.lora.params())
        return _scores(plan, _row_order(plan)[1], logps, totals)

    def _program(
        self, plan: StreamPlan, totals: Totals, reference: Scores | None, key: mx.array | None
    ) -> Program:
        chains = [self._chain(plan, group, key) for group in plan.groups]
        gather_from, positions, targets = _row_order(plan)
        targets = mx.array(targets)
        weights = self.adapter.head_weights()

        def gather(ends: Sequence[Carry]) -> mx.array:
            states = {name: state for end in ends for name, state in end.items()}
            rows = []
            for name, index in gather_from.items():
                hidden = self.adapter.finish(states[name])
                rows.append(_take(hidden.reshape(-1, hidden.shape[-1]), index))
            return mx.concatenate(rows)

        def score(hidden: mx.array, start: int) -> mx.array:
            return self.head(hidden, targets[start : start + hidden.shape[0]], weights)

        def loss(logps: mx.array) -> tuple[mx.array, Metrics]:
            return self.method.loss(_scores(plan, positions, logps, totals), reference)

        rows = targets.shape[0]
        return Program(chains, gather, score, rows, self.head.rows_per_call(rows), loss)

    def _chain(self, plan: StreamPlan, group: Sequence[str], key: mx.array | None) -> Chain:
        streams = {name: plan.streams[name] for name in group}
        start: Carry = {}
        constants: dict[str, Constants] = {}
        for name, stream in streams.items():
            start[name], constants[name] = evaluate(self.adapter.embed(mx.array(stream.ids)))
        order = {name: number for number, name in enumerate(plan.streams)}
        keys = {name: None if key is None else mx.random.split(key, len(order))[order[name]] for name in group}
        stages = [
            self._stage(block, half, streams, constants, keys)
            for block in self.adapter.blocks()
            for half in _HALVES[self.backward.granularity_of_stages]
        ]
        return Chain(start, stages)

    def _stage(
        self,
        block: Block,
        half: int | None,
        streams: Mapping[str, Stream],
        constants: Mapping[str, Constants],
        keys: Mapping[str, mx.array | None],
    ) -> Stage:
        has_children = {stream.parent for stream in streams.values()}

        def function(params: Params, carry: Carry) -> Carry:
            out: Carry = {}
            captured = {}
            for name, stream in streams.items():
                cache, offset = None, 0
                if name in has_children:
                    cache = CaptureKV()
                elif stream.parent is not None:
                    offset = streams[stream.parent].ids.shape[1]
                    # a half without attention, or a block that reads another block's keys, captures nothing
                    cache = PrefixKV(captured.get(stream.parent), offset)
                attention = StreamAttention(stream.ids.shape[1], offset, cache)
                with self.lora.bound(params, keys[name]):
                    if half is None:
                        out[name] = self.adapter.run(block, carry[name], constants[name], attention)
                    else:
                        out[name] = self.adapter.run_half(block, half, carry[name], constants[name], attention)
                if name in has_children:
                    captured[name] = cache.captured
            return out

        return Stage(self.lora.names_under(block.path), function)


def _row_order(plan: StreamPlan) -> tuple[dict[str, np.ndarray], list[np.ndarray], np.ndarray]:
    """Scored rows sorted by stream, as they are gathered.

    Returns:
        stream name -> flat indices to gather; per span, the positions of its rows in the gathered order; all targets.
    """
    stream = np.concatenate([span.stream for span in plan.spans])
    index = np.concatenate([span.index for span in plan.spans])
    target = np.concatenate([span.target for span in plan.spans])
    order = np.lexsort((index, stream))
    names = list(plan.streams)
    gather_from = {names[number]: index[order][stream[order] == number] for number in np.unique(stream)}
    where = np.empty(len(order), np.int32)
    where[order] = np.arange(len(order), dtype=np.int32)
    ends = np.cumsum([len(span.index) for span in plan.spans])
    return gather_from, np.split(where, ends[:-1]), target[order]


def _scores(plan: StreamPlan, positions: Sequence[np.ndarray], logps: mx.array, totals: Totals) -> Scores:
    spans = {
        (span.branch, span.part): TokenLogps(_take(logps, where), mx.array(span.row), plan.batch_rows)
        for span, where in zip(plan.spans, positions)
    }
    return Scores(spans, totals)


def _take(array: mx.array, index: np.ndarray) -> mx.array:
    """Rows `index` of an array. A run of neighbours is a slice, whose gradient needs no scatter."""
    if len(index) and (np.diff(index) == 1).all():
        return array[int(index[0]) : int(index[-1]) + 1]
    return array[mx.array(index)]

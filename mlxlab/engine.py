"""One training step: batch and axes in; loss, metrics and gradients out.

The only module that knows every axis, and it asks none of them for its name. It turns a batch into a `Program`
(streams through blocks, scored rows through the head, log-probabilities through the method) and hands that to the
backward strategy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Hashable, Sequence

import mlx.core as mx
import numpy as np

from mlxlab import backend
from mlxlab.attend import Router
from mlxlab.attention import CaptureKV, PrefixKV, StreamAttention, document_starts
from mlxlab.interfaces import (
    Backward,
    Block,
    Example,
    Head,
    Layout,
    Method,
    Metrics,
    ModelAdapter,
    Params,
    Scores,
    StepResult,
    StreamPlan,
    TokenLogps,
    Totals,
)
from mlxlab.lora import Lora
from mlxlab.program import Carry, Chain, Program, Stage, StreamConstants, evaluate, forward, run
from mlxlab.settings import ATTENTION_FORMS

_HALVES = {"block": (None,), "half": (0, 1)}
_DROPOUT = "dropout_key"
_STARTS = "document_starts"


class StepEngine:
    """Assembles the training step from whatever was chosen.

    Args:
        adapter: walks the model block by block.
        lora: the trainable leaves inside it.
        method, head, backward, layout: the chosen components.
        attention: the wanted form, see `mlxlab.attend`.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        lora: Lora,
        method: Method,
        head: Head,
        backward: Backward,
        layout: Layout,
        attention: str = ATTENTION_FORMS[0],
    ):
        self.adapter, self.lora = adapter, lora
        self.method, self.head, self.backward, self.layout = method, head, backward, layout
        self.router = Router(attention)
        self._compiled: dict[Hashable, Callable] = {}

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

    def describe_attention(self, batch: Sequence[Example]) -> str:
        """What attention a micro-batch takes: number of calls, form and mask. Its layers are built, but not computed.

        Raises:
            CompatError: the wanted form cannot be had.
        """
        self.router.chosen.clear()
        plan, params = self.layout.plan(batch, self.method.spans()), self.lora.params()
        for group in plan.groups:
            chain = self._chain(plan, group, None)
            run(chain.stages, params, chain.start, chain.constants)
        return ", ".join(f"{calls} x {what}" for what, calls in self.router.chosen.items()) or "fused"

    def _reference(self, plan: StreamPlan, totals: Totals) -> Scores | None:
        if not self.method.needs_reference:
            return None
        program = self._program(plan, totals, None, None)
        with self.lora.disabled():
            logps = forward(program, self.lora.params())
        return _scores(plan, _row_order(plan)[1], logps, totals)

    def _program(self, plan: StreamPlan, totals: Totals, reference: Scores | None, key: mx.array | None) -> Program:
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

        def loss(logps: mx.array) -> tuple[mx.array, Metrics]:
            return self.method.loss(_scores(plan, positions, logps, totals), reference)

        return Program(
            chains=chains,
            gather=gather,
            score=lambda hidden, targets: self.head(hidden, targets, weights),
            targets=targets,
            rows_per_call=self.head.rows_per_call(targets.shape[0]),
            loss=loss,
            linear=self.method.linear,
            compile=self._compile,
            compile_head=self._compile if self.head.compiles else lambda key, function: function,
        )

    def _chain(self, plan: StreamPlan, group: Sequence[str], key: mx.array | None) -> Chain:
        streams = {name: plan.streams[name] for name in group}
        start: Carry = {}
        constants: StreamConstants = {}
        for number, (name, stream) in enumerate(plan.streams.items()):
            if name in streams:
                start[name], constants[name] = evaluate(self.adapter.embed(mx.array(stream.ids)))
                if key is not None:
                    constants[name][_DROPOUT] = mx.random.split(key, len(plan.streams))[number]
                if stream.documents is not None:
                    constants[name][_STARTS] = mx.array(document_starts(stream.documents)[0])
        # what a stage does depends on lengths and parents only, so that batches of one shape share compiled stages
        signature = tuple(
            (name, stream.ids.shape[1], stream.parent, document_starts(stream.documents)[1])
            for name, stream in streams.items()
        )
        stages = [
            self._stage(block, half, signature)
            for block in self.adapter.blocks()
            for half in _HALVES[self.backward.granularity_of_stages]
        ]
        return Chain(start, constants, stages)

    def _stage(
        self, block: Block, half: int | None, signature: tuple[tuple[str, int, str | None, int | None], ...]
    ) -> Stage:
        lengths = {name: length for name, length, _, _ in signature}
        has_children = {parent for _, _, parent, _ in signature}

        def function(params: Params, carry: Carry, constants: StreamConstants) -> Carry:
            out: Carry = {}
            captured = {}
            for name, length, parent, longest in signature:
                cache, offset = None, 0
                if name in has_children:
                    cache = CaptureKV()
                elif parent is not None:
                    # a half without attention, or a block that reads another block's keys, captures nothing
                    cache, offset = PrefixKV(captured.get(parent), lengths[parent]), lengths[parent]
                attention = StreamAttention(length, offset, cache, constants[name].get(_STARTS), longest)
                with self.lora.bound(params, constants[name].get(_DROPOUT)):
                    arguments = (carry[name], constants[name], attention)
                    if half is None:
                        call = partial(self.adapter.run, block, *arguments)
                    else:
                        call = partial(self.adapter.run_half, block, half, *arguments)
                    out[name] = self.router.run(self.adapter, block, attention, call)
                if name in has_children:
                    captured[name] = cache.captured
            return out

        return Stage((signature, block.index, half), self.lora.names_under(block.path), function)

    def _compile(self, key: Hashable, function: Callable) -> Callable:
        """Functions that are used again are compiled on a GPU; MLX's CPU code gains nothing from it.

        The first use is not compiled. So a shape that comes once costs nothing, and it shows whether blockwise
        attention is inside, whose long chains of operations take minutes to compile.
        """
        if backend.device() == "cpu" or not self.adapter.compiles:
            return function

        def first(*arguments: Any) -> Any:
            before = self.router.blockwise_calls
            result = function(*arguments)
            self._compiled[key] = function if self.router.blockwise_calls > before else mx.compile(function)
            return result

        return self._compiled.get(key, first)


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

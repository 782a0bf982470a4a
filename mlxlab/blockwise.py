"""Attention whose memory is linear in the sequence length, in MLX array operations.

Queries are taken a tile at a time. A tile needs only the keys between its first query's first visible key and its last
query's position, so a window costs length x window, and tiles of equal shape are one batched product. The backward pass
keeps the output and the log-sum-exp of each row and computes the scores again, tile by tile (Dao et al., 2022; Dao,
2023). A tile holds whole rows of scores, so its softmax needs no rescaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Callable

import mlx.core as mx

from mlxlab import backend
from mlxlab.elementwise import exp, on_cpu

# Of one step's scores in float32: a GPU wants many rows at once, a CPU what stays in its cache.
STEP_BYTES = {"cpu": 2 << 20, "metal": 64 << 20, "cuda": 256 << 20}
_TILES = 16, 512  # fewest and most queries of a tile


@dataclass(frozen=True)
class Step:
    """Some tiles of `tile` queries each, from query `start` on; together they see keys `first` up to `last`.

    Tile t sees `width` of them, from first + t * tile on.
    """

    start: int
    tiles: int
    tile: int
    first: int
    last: int

    @property
    def stop(self) -> int:
        return self.start + self.tiles * self.tile

    @property
    def width(self) -> int:
        return self.last - self.first - (self.tiles - 1) * self.tile


def steps(queries: int, keys: int, window: int | None, row_bytes: int, step_bytes: int) -> list[Step]:
    """How causal attention is cut; the last query stands at the last key, and there are no more queries than keys.

    Args:
        window: how many keys a query may see at most (itself among them), or None.
        row_bytes: of one column of scores: batch x heads x 4.
        step_bytes: bound on the scores of one step, kept down to the smallest tile.
    """
    offset, (least, most) = keys - queries, _TILES

    def width(size: int) -> int:
        """Keys of a tile away from the first key; a multiple of the tile, so that gradients add up in whole tiles."""
        return keys if window is None else min(keys, -(-(size + window - 1) // size) * size)

    # a tile computes up to `tile` keys per query more than needed, so a narrow window wants narrow tiles
    tile = most if window is None else max(4 * least, -(-window // (4 * least)) * least)
    tile = min(tile, most)
    while tile > least and tile * width(tile) * row_bytes > step_bytes:
        tile //= 2
    result: list[Step] = []
    for start in range(0, queries, tile):
        size = min(tile, queries - start)
        last = offset + start + size
        wide = min(last, width(size))
        before = result[-1] if result else None
        # neighbours of one shape, whose keys move on as their queries do, are one batch
        alike = before is not None and (before.tile, before.width) == (size, wide)
        if alike and (before.tiles + 1) * size * wide * row_bytes <= step_bytes:
            result[-1] = Step(before.start, before.tiles + 1, size, before.first, last)
        else:
            result.append(Step(start, 1, size, last - wide, last))
    return result


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    window: int | None = None,
    starts: mx.array | None = None,
    longest: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    step_bytes: int | None = None,
) -> mx.array:
    """Causal attention; the last query stands at the last key. Rows that see no key are 0, and so are their gradients.

    Args:
        queries: [B, heads, L, D]; keys: [B, groups, K, D]; values: [B, groups, K, Dv]; groups divides heads.
        scale: of the products of queries and keys.
        window: how many keys a query may see at most, itself among them; None: all.
        starts: first key that a query may see, int32 [B, L]; None: 0. Not differentiated.
        longest: promise that no query has more than so many keys between its first one and itself.
        sinks: logit of a key without value that every query of a head sees, [heads].
        softcap: scores become softcap * tanh(scores / softcap) before anything is hidden.
        step_bytes: bound on the float32 scores that exist at a time.

    Returns:
        [B, heads, L, Dv] in the dtype of the queries. Sums, maxima and log-sum-exp are float32.
    """
    heads, groups = queries.shape[1], keys.shape[1]
    options = {"window": window, "longest": longest, "sinks": sinks, "softcap": softcap, "step_bytes": step_bytes}
    before = queries.shape[2] - keys.shape[2]
    if before > 0:  # queries that stand before the first key
        starts = None if starts is None else starts[:, before:]
        rest = attention(queries[:, :, before:], keys, values, scale=scale, starts=starts, **options)
        return mx.concatenate([mx.zeros((*queries.shape[:2], before, values.shape[-1]), rest.dtype), rest], axis=2)
    widest = min((bound for bound in (window, longest) if bound is not None), default=None)
    row_bytes, step_bytes = 4 * queries.shape[0] * heads, step_bytes or STEP_BYTES[backend.device()]
    cut = steps(queries.shape[2], keys.shape[2], widest, row_bytes, step_bytes)
    tiles = _Tiles(window, starts, softcap, keys.shape[2] - queries.shape[2])
    # scaled before the product, whose float16 sums could overflow
    arrays = [mx.unflatten(queries * scale, 1, (groups, heads // groups)), keys, values]
    if sinks is not None:
        arrays.append(sinks.reshape(groups, -1))

    @mx.custom_function
    def run(queries, keys, values, *sinks):
        outputs, sums = [], []
        after: list[mx.array] = []
        for step in cut:
            output, total = tiles.forward(step, _slice(queries, step, after), keys, values, sinks)
            after = [output, total]
            outputs.append(output)
            sums.append(total)
        return mx.concatenate(outputs, axis=3), mx.concatenate(sums, axis=3)

    @run.vjp
    def backward(primals, cotangents, outputs):
        queries, keys, values, *sinks = primals
        (output, sums), (cotangent, _) = outputs, cotangents
        # the part of the score's gradient that is the same for all keys of a row (Dao, 2023, algorithm 2)
        delta = (output.astype(mx.float32) * cotangent.astype(mx.float32)).sum(-1, keepdims=True)
        d_queries, after = [], []
        d_keys, d_values = mx.zeros(keys.shape, mx.float32), mx.zeros(values.shape, mx.float32)
        for step in reversed(cut):
            parts = [_slice(x, step, after) for x in (queries, cotangent, sums, delta)]
            d_query, d_key, d_value = tiles.backward(step, *parts, keys, values)
            d_keys, d_values = _add(d_keys, d_key, step), _add(d_values, d_value, step)
            after = [d_query, d_keys, d_values]
            d_queries.insert(0, d_query)
        result = [mx.concatenate(d_queries, axis=3), d_keys.astype(keys.dtype), d_values.astype(values.dtype)]
        if sinks:
            weights = mx.exp(sinks[0].astype(mx.float32)[None, :, :, None, None] - sums)
            result.append(-(weights * delta).sum(axis=(0, 3, 4)).astype(sinks[0].dtype))
        return tuple(result)

    output, _ = run(*arrays)
    return output.reshape(*queries.shape[:3], values.shape[-1])


class _Tiles:
    """Forward and backward of one step. Queries and everything of their form: [B, groups, repeats, rows, ...]."""

    def __init__(self, window: int | None, starts: mx.array | None, softcap: float | None, offset: int):
        self._window, self._starts, self._softcap, self._offset = window, starts, softcap, offset

    def forward(self, step, queries, keys, values, sinks):
        """Output [B, groups, repeats, rows, Dv] and log-sum-exp [..., 1] of the queries of a step."""
        b, g, r = queries.shape[:3]
        scores = _fold(queries, step) @ _gather(keys, step).swapaxes(-1, -2)
        sink = None if not sinks else sinks[0].astype(mx.float32)[None, :, None, :, None, None]
        weights, total, sums = self._kernel(_probabilities)(
            scores.reshape(b, g, step.tiles, r, step.tile, -1), self._hidden(step), sink
        )
        output = weights.reshape(scores.shape) @ _gather(values, step)
        output = output.reshape(b, g, step.tiles, r, step.tile, -1).astype(mx.float32) / total
        return _rows(output.astype(queries.dtype)), _rows(sums)

    def backward(self, step, queries, cotangent, sums, delta, keys, values):
        """Gradients of the queries [like them] and of the keys and values that they see [B, groups, keys, D]."""
        b, g, r = queries.shape[:3]
        folded, cotangent = _fold(queries, step), _fold(cotangent, step)
        keys, values = _gather(keys, step), _gather(values, step)
        scores = folded @ keys.swapaxes(-1, -2)
        d_weights = cotangent @ values.swapaxes(-1, -2)
        shape = (b, g, step.tiles, r, step.tile, -1)
        weights, d_scores = self._kernel(_gradients)(
            scores.reshape(shape),
            d_weights.reshape(shape),
            self._hidden(step),
            _fold(sums, step).reshape(shape),
            _fold(delta, step).reshape(shape),
        )
        weights, d_scores = weights.reshape(scores.shape), d_scores.reshape(scores.shape)
        d_queries = _rows((d_scores @ keys).reshape(shape))
        return d_queries, d_scores.swapaxes(-1, -2) @ folded, weights.swapaxes(-1, -2) @ cotangent

    def _hidden(self, step: Step) -> mx.array:
        """0 where a query sees a key and -inf where not, float32, broadcast to [B, 1, tiles, 1, tile, width]."""
        row, column = mx.arange(step.tile)[:, None], mx.arange(step.width)[None]
        # how far the key stands before the query is the same in every tile
        distance = row - column + (self._offset + step.start - step.first)
        seen = distance >= 0
        if self._window is not None:
            seen = seen & (distance < self._window)
        seen = seen[None, None, None, None]
        if self._starts is not None:
            starts = self._starts[:, step.start : step.stop].reshape(-1, 1, step.tiles, 1, step.tile, 1)
            tile = mx.arange(step.tiles).reshape(1, 1, -1, 1, 1, 1)
            seen = seen & (column + (tile * step.tile + step.first) >= starts)
        return mx.where(seen, 0.0, -float("inf"))

    def _kernel(self, function: Callable) -> Callable:
        return _compiled(function, self._softcap, on_cpu())


@cache
def _compiled(function: Callable, softcap: float | None, cpu: bool) -> Callable:
    """Elementwise work in few passes over the scores; MLX's CPU code gains nothing from that."""

    def call(*arrays):
        return function(softcap, *arrays)

    return call if cpu else mx.compile(call)


def _capped(softcap, scores, hidden):
    """Logits in float32, and tanh of what the cap bends (None without one)."""
    scores = scores.astype(mx.float32)
    if softcap is None:
        return scores + hidden, None
    bent = mx.tanh(scores / softcap)
    return bent * softcap + hidden, bent


def _probabilities(softcap, scores, hidden, sink):
    """exp(logit - maximum), its sum and the log-sum-exp; an empty row has 1 and inf, so that what follows is 0."""
    logits, _ = _capped(softcap, scores, hidden)
    largest = logits.max(-1, keepdims=True)
    if sink is not None:
        largest = mx.maximum(largest, sink)
    largest = mx.maximum(largest, -3e38)  # -inf minus -inf is not a number
    weights = exp(logits - largest)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - largest)
    empty = total == 0
    sums = mx.where(empty, float("inf"), largest + mx.log(total))
    return weights.astype(scores.dtype), mx.where(empty, 1.0, total), sums


def _gradients(softcap, scores, d_weights, hidden, sums, delta):
    """Probabilities, and the gradient at the products of queries and keys, both in the dtype of the scores."""
    logits, bent = _capped(softcap, scores, hidden)
    weights = exp(logits - sums)
    d_scores = weights * (d_weights.astype(mx.float32) - delta)
    if bent is not None:
        d_scores = d_scores * (1 - mx.square(bent))
    return weights.astype(scores.dtype), d_scores.astype(scores.dtype)


def _slice(x: mx.array, step: Step, after: list[mx.array]) -> mx.array:
    """Rows of a step, not before `after` is there: otherwise all steps of a lazy graph could be in memory at once."""
    part = x[:, :, :, step.start : step.stop]
    return mx.depends(part, after) if after else part


def _fold(x: mx.array, step: Step) -> mx.array:
    """[B, groups, repeats, rows, D] -> [B, groups, tiles, repeats * tile, D]: the heads of a group make one product."""
    b, g, r, _, d = x.shape
    x = x.reshape(b, g, r, step.tiles, step.tile, d)
    return x.swapaxes(2, 3).reshape(b, g, step.tiles, r * step.tile, d)


def _rows(x: mx.array) -> mx.array:
    """[B, groups, tiles, repeats, tile, D] -> [B, groups, repeats, rows, D]."""
    b, g, tiles, r, tile, d = x.shape
    return x.swapaxes(2, 3).reshape(b, g, r, tiles * tile, d)


def _gather(x: mx.array, step: Step) -> mx.array:
    """Keys or values of each tile [B, groups, tiles, width, D]; tiles overlap in memory, nothing is repeated."""
    x = x[:, :, step.first : step.last]
    if step.tiles == 1:
        return x[:, :, None]
    b, g, length, d = x.shape
    strides = (g * length * d, length * d, step.tile * d, d, 1)
    return mx.as_strided(mx.contiguous(x), (b, g, step.tiles, step.width, d), strides)


def _add(total: mx.array, tiles: mx.array, step: Step) -> mx.array:
    """`total` float32 [B, groups, K, D] plus what each tile [B, groups, tiles, width, D] has for the keys it sees."""
    b, g, count, width, d = tiles.shape
    part = width if count == 1 else step.tile
    for begin in range(0, width, part):  # the same part of all tiles is one run of keys
        keys = slice(step.first + begin, step.first + begin + count * part)
        new = tiles[:, :, :, begin : begin + part].reshape(b, g, count * part, d)
        total = total.at[:, :, keys].add(new.astype(mx.float32))
    return total

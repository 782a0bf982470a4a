"""The flash head's cross-entropy as Metal kernels: neither logits [M, V] nor expanded weights in device memory.

Forward: a threadgroup walks through at most 8192 vocabulary rows for 64 hidden rows with an online softmax (Milakov and
Gimelshein, 2018); the partial results of all vocabulary blocks are merged in array operations. The bound on the rows
keeps every threadgroup far below the time after which the GPU's watchdog ends it.

Backward: two kernels per range of the vocabulary. The first recomputes the logits and writes the coefficients, the
gradient at h W^T, to a float32 scratch array [M_chunk, range] of at most 32 MiB; the second adds coefficients W to the
gradient. Accumulators for all H columns do not fit into registers, slabs of H would recompute the logits once per slab,
and atomic additions would make the gradient differ from run to run; with the scratch array both kernels are plain tiled
products and the result is deterministic.

Weights are dequantized while tiles are staged in threadgroup memory; every product accumulates in float32.
"""

from __future__ import annotations

import functools
from typing import Callable

import mlx.core as mx

from mlxlab import backend
from mlxlab.heads import flash_metal_source as source
from mlxlab.heads.weights import HeadWeights

BLOCK_ROWS = 8192  # vocabulary rows that one threadgroup may walk through
SCRATCH_BYTES = 32 * 2**20
_CHUNK_ROWS = 2048
_THREADGROUPS = 1024  # as many as fill a large GPU several times over
_FLOATS = (mx.float32, mx.bfloat16, mx.float16)

DEVICE, TITLE = "metal", "Metal"  # of this kernel, for flash_check
LOGP_TOLERANCE = 1e-3  # relative to 1 + size, against float32 array operations


def supports(dtype: mx.Dtype, weights: HeadWeights) -> str | None:
    """None if the kernels can compute this head here, else one sentence that says why not."""
    matrix, hidden = weights.matrix, weights.matrix.shape[1]
    if backend.device() != "metal":
        return f"the Metal kernel runs on Apple GPUs only, and MLX computes on {backend.device()} here."
    if dtype not in _FLOATS:
        return f"the Metal kernel takes hidden states in float32, bfloat16 or float16, not {_name(dtype)}."
    if hidden % 32:
        return f"the Metal kernel needs a hidden size that is a multiple of 32, and this model's is {hidden}."
    if not matrix.quantized:
        if matrix.weight.dtype not in _FLOATS:
            name = _name(matrix.weight.dtype)
            return f"the Metal kernel takes dense weights in float32, bfloat16 or float16, not {name}."
        return None
    if matrix.mode != "affine" or matrix.biases is None:
        return f"the Metal kernel takes affine quantization, and this projection's mode is {matrix.mode}."
    if matrix.bits not in (4, 8) or matrix.group_size not in (32, 64, 128):
        return (
            "the Metal kernel takes 4 or 8 bits in groups of 32, 64 or 128, "
            f"and this projection has {matrix.bits} bits in groups of {matrix.group_size}."
        )
    return None


def forward(hidden: mx.array, targets: mx.array, weights: HeadWeights) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probability of each row's target.

    Args:
        hidden: [M, H], float32, bfloat16 or float16.
        targets: int32 [M].
        weights: as `supports` allows.

    Returns:
        logp, peak and log_sum, float32 [M] each: the log-probability, the largest logit, and the log of the sum of
        exponentials relative to it; logp = (z_target - peak) - log_sum.
    """
    rows, blocks = hidden.shape[0], _blocks(hidden.shape[0], weights.vocabulary)
    part_peak, part_total, part_target = _launch(
        "forward", weights, {"hidden": hidden, "targets": targets.astype(mx.int32)}, blocks, rows,
        {name: (2 * blocks, rows) for name in ("part_peak", "part_total", "part_target")},
    )  # fmt: skip
    peak = part_peak.max(axis=0)
    log_sum = mx.log((part_total * mx.exp(part_peak - peak)).sum(axis=0))
    return (part_target.sum(axis=0) - peak) - log_sum, peak, log_sum


def backward(
    hidden: mx.array,
    targets: mx.array,
    weights: HeadWeights,
    cotangent: mx.array,
    peak: mx.array,
    log_sum: mx.array,
) -> mx.array:
    """Gradient at the hidden rows, [M, H] in their dtype, for a cotangent float32 [M] of logp.

    peak and log_sum are those that `forward` returned.
    """
    per_row = {"targets": targets.astype(mx.int32), "cotangent": cotangent.astype(mx.float32)}
    per_row |= {"peak": peak, "log_sum": log_sum}
    pieces = []
    for start in range(0, hidden.shape[0], _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        pieces.append(_chunk_gradient(hidden[chunk], {name: value[chunk] for name, value in per_row.items()}, weights))
    gradient = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    return gradient.astype(hidden.dtype)


def _chunk_gradient(hidden: mx.array, per_row: dict[str, mx.array], weights: HeadWeights) -> mx.array:
    rows, columns = hidden.shape
    width = min(BLOCK_ROWS, SCRATCH_BYTES // (4 * rows) // source.TILE * source.TILE)
    gradient = mx.zeros((rows, columns), mx.float32)
    for start in range(0, weights.vocabulary, width):
        tile = weights.tile(start, start + width)
        inputs = {"hidden": hidden} | per_row | {"targets": per_row["targets"] - start}
        shape = {"coefficients": (rows, tile.vocabulary)}
        (coefficients,) = _launch("coefficients", tile, inputs, _tiles(tile.vocabulary), rows, shape)
        inputs = {"coefficients": coefficients, "gradient": gradient}
        (gradient,) = _launch("accumulate", tile, inputs, _tiles(columns), rows, {"sum": (rows, columns)})
    return gradient


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _tiles(length: int) -> int:
    return -(-length // source.TILE)


def _blocks(rows: int, vocabulary: int) -> int:
    """Parts of the vocabulary: enough to bound and to spread the work, at most one per tile."""
    tiles = _tiles(vocabulary)
    bounded, spread = -(-tiles * source.TILE // BLOCK_ROWS), -(-_THREADGROUPS // _tiles(rows))
    return min(tiles, max(bounded, spread))


def _launch(
    kind: str,
    weights: HeadWeights,
    inputs: dict[str, mx.array],
    across: int,
    rows: int,
    outputs: dict[str, tuple[int, ...]],
) -> list[mx.array]:
    """Run one kernel on `across` threadgroups per tile of rows; its outputs are float32 arrays of the given shapes."""
    matrix, template = weights.matrix, []
    inputs = inputs | {"weight": matrix.weight}
    if matrix.quantized:
        inputs |= {"scales": matrix.scales, "biases": matrix.biases}
        template += [("BITS", matrix.bits), ("GROUP", matrix.group_size)]
    if kind != "accumulate":
        if weights.bias is not None:
            inputs |= {"bias": weights.bias}
        # A softcap of 1 stands for none: it is read but not used.
        inputs |= {"scaling": mx.array([weights.scale, weights.softcap or 1.0], mx.float32)}
        template += [("SOFTCAP", weights.softcap is not None)]
    kernel = _kernel(kind, tuple(inputs), tuple(outputs))
    return kernel(
        inputs=list(inputs.values()),
        template=template,
        grid=(source.THREADS * across, _tiles(rows), 1),
        threadgroup=(source.THREADS, 1, 1),
        output_shapes=list(outputs.values()),
        output_dtypes=[mx.float32] * len(outputs),
    )


@functools.cache
def _kernel(kind: str, input_names: tuple[str, ...], output_names: tuple[str, ...]) -> Callable[..., list[mx.array]]:
    quantized, bias = "scales" in input_names, "bias" in input_names
    body = {"forward": source.FORWARD, "coefficients": source.COEFFICIENTS, "accumulate": source.ACCUMULATE}[kind]
    body = body.replace("$MATRIX", source.QUANTIZED if quantized else source.DENSE)
    body = body.replace("$BIAS", " + float(bias[entry])" if bias else "")
    return mx.fast.metal_kernel(
        name=f"mlxlab_flash_{kind}{'_quantized' if quantized else ''}{'_bias' if bias else ''}",
        input_names=list(input_names),
        output_names=list(output_names),
        source=body,
        header=source.HEADER,
    )

"""The flash head's cross-entropy as CUDA kernels: neither logits [M, V] nor expanded weights [V, H] in device memory.

Forward: every block walks through a part of the vocabulary for a tile of rows with an online softmax (Milakov and
Gimelshein, 2018); the partial results of all parts are merged in array operations.

Backward: one kernel with two kinds of work in one queue. Accumulators for all H columns do not fit one block, and slabs
of H would recompute the logits once per slab. So one kind recomputes a tile of logits and writes its coefficients, the
gradient at h W^T, to a scratch array in bfloat16; the other adds coefficients W to the gradient, in float32, once per
range of the vocabulary. Three ranges are in flight, so that no block waits, and chunks of rows follow one another in
the same queue, so that scratch memory does not grow with M or V. The order of all additions is fixed: the result is
deterministic. Being one operation, it bounds its memory inside a lazy graph too, where separate operations over ranges
would keep all their temporaries until the GPU catches up. Handing the second product to cuBLAS was the alternative; it
needs the expanded range of W and a gradient array per range in device memory, and an evaluation per range to free them.

Measured on an H200 (MLX 0.32.4, M 8192, H 1536, V 130560, 4 bits in groups of 64, forward and backward): 22 ms with
53 MiB beside the result; expanding the head once and multiplying in chunks of 2048 rows takes 44 ms in plain array
operations and 24 ms in compiled ones, with 3 to 4 GiB.

Weights are dequantized on their way into shared memory. Products run on the tensor cores in bfloat16 with float32
accumulators: `wgmma` on sm_90, `mma.sync` elsewhere from sm_80 on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable

import mlx.core as mx

from mlxlab import backend
from mlxlab.heads import flash_cuda_source as source
from mlxlab.heads.weights import HeadWeights

_FORWARD_BLOCKS = 1024  # as many as fill a large GPU several times over
_BACKWARD_BLOCKS = 256  # they draw from a queue: more than are resident do no harm
_SCRATCH_BYTES = 50 * 2**20  # of the backward kernel
_RANGE_TILES = 16  # vocabulary tiles of a range, at most
# Pieces of work between one and what waits for it. Somewhat more than an H200 has multiprocessors, so that none waits.
_DISTANCE = 176
_FLOATS = (mx.bfloat16, mx.float16, mx.float32)

DEVICE, TITLE = "cuda", "CUDA"  # of this kernel, for flash_check
# Relative to 1 + size, against float32 array operations: dequantized weights are rounded to bfloat16.
LOGP_TOLERANCE = 1e-2


def supports(dtype: mx.Dtype, weights: HeadWeights) -> str | None:
    """None if the kernels can compute this head here, else one sentence that says why not."""
    matrix, hidden = weights.matrix, weights.matrix.shape[1]
    if backend.device() != "cuda":
        return f"the CUDA kernel runs on NVIDIA GPUs only, and MLX computes on {backend.device()} here."
    if _capability() < (8, 0):
        major, minor = _capability()
        return f"the CUDA kernel needs compute capability 8.0 or later, and this GPU's is {major}.{minor}."
    if dtype != mx.bfloat16:
        return f"the CUDA kernel takes hidden states in bfloat16, not {dtype}."
    if not matrix.quantized:
        if matrix.weight.dtype != mx.bfloat16:
            return f"the CUDA kernel takes dense weights in bfloat16, not {matrix.weight.dtype}."
        if hidden % 16:
            return f"the CUDA kernel needs a hidden size that is a multiple of 16, and this model's is {hidden}."
        return None
    if matrix.mode != "affine" or matrix.biases is None:
        return f"the CUDA kernel takes affine quantization, and this projection's mode is {matrix.mode}."
    if matrix.bits not in (4, 8) or matrix.group_size not in (32, 64, 128):
        return (
            "the CUDA kernel takes 4 or 8 bits in groups of 32, 64 or 128, "
            f"and this projection has {matrix.bits} bits in groups of {matrix.group_size}."
        )
    if matrix.scales.dtype not in _FLOATS or matrix.biases.dtype != matrix.scales.dtype:
        return (
            "the CUDA kernel takes scales and biases in one of bfloat16, float16 and float32, "
            f"and this projection's are in {matrix.scales.dtype} and {matrix.biases.dtype}."
        )
    return None


def forward(hidden: mx.array, targets: mx.array, weights: HeadWeights) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probability of each row's target.

    Args:
        hidden: bfloat16 [M, H].
        targets: int32 [M].
        weights: as `supports` allows.

    Returns:
        logp, peak and log_sum, float32 [M] each: the log-probability, the largest logit, and the log of the sum of
        exponentials relative to it; logp = (z_target - peak) - log_sum.
    """
    rows, columns = hidden.shape
    if rows == 0:
        return mx.zeros((0,)), mx.zeros((0,)), mx.zeros((0,))
    options = _options(weights)
    tiles, row_tiles = _ceil(weights.vocabulary, options.columns), _ceil(rows, options.rows)
    per_part = _ceil(tiles, min(tiles, _ceil(_FORWARD_BLOCKS, row_tiles)))
    parts = _ceil(tiles, per_part)
    parameters = {"rows": rows, "vocabulary": weights.vocabulary, "columns": columns}
    parameters |= {"vocabulary_tiles_per_part": per_part}
    # Where four warps share the columns of a tile, each reports on its own.
    shape = (parts if options.wgmma else 4 * parts, rows)
    part_peak, part_total, part_target = _launch(
        "forward", options, parameters, {"hidden": hidden, "targets": targets}, weights,
        {name: (shape, mx.float32) for name in ("part_peak", "part_total", "part_target")},
        blocks=(row_tiles, parts),
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
    rows, columns = hidden.shape
    if rows == 0:
        return mx.zeros_like(hidden)
    options = _options(weights)
    plan = Plan.of(rows, columns, weights.vocabulary, options)
    result = hidden.dtype if plan.parts == 1 else mx.float32
    per_row = {"targets": targets, "cotangent": cotangent, "peak": peak, "log_sum": log_sum}
    gradient = _launch(
        "backward", options, plan.parameters(rows, columns, weights.vocabulary),
        {"hidden": hidden} | per_row, weights,
        {
            "gradient": ((plan.parts, rows, columns), result),
            "coefficients": (plan.coefficients, mx.bfloat16),
            "partial": (plan.partial, mx.float32),
            "counters": ((1 + 2 * plan.steps * plan.virtual_tiles,), mx.int32),
        },
        blocks=(min(_BACKWARD_BLOCKS, plan.items), 1),
        template=[("Result", result)],
        init_value=0.0,
    )[0]  # fmt: skip
    return gradient.squeeze(0) if plan.parts == 1 else gradient.sum(axis=0).astype(hidden.dtype)


@dataclass(frozen=True)
class Plan:
    """How the backward kernel divides its work. A virtual tile is a tile of rows and one part of the vocabulary.

    With few rows, parts of the vocabulary are worked on side by side and their gradients are added at the end.
    """

    options: source.Options
    parts: int
    vocabulary_tiles_per_part: int
    row_tiles: int  # of a chunk of rows
    chunks: int
    range_tiles: int  # vocabulary tiles of a range
    ranges: int  # of a part
    column_tiles: int
    tiles_per_item: int  # vocabulary tiles of a piece of work

    @classmethod
    def of(cls, rows: int, columns: int, vocabulary: int, options: source.Options) -> Plan:
        row_tiles, tiles = _ceil(rows, options.rows), _ceil(vocabulary, options.columns)
        column_tiles = _ceil(columns, options.columns)
        tiles_per_item = 2 if column_tiles >= 6 else 1
        wanted = min(12, _ceil(_DISTANCE, _RANGE_TILES // tiles_per_item + column_tiles))  # virtual tiles
        chunks = max(1, round(row_tiles / wanted))
        per_chunk = _ceil(row_tiles, chunks)
        parts = min(tiles, max(1, (wanted + per_chunk // 2) // per_chunk)) if chunks == 1 else 1
        per_part = _ceil(tiles, parts)
        parts = _ceil(tiles, per_part)
        virtual = parts * per_chunk
        accumulators = 4 * virtual * options.rows * column_tiles * options.columns
        left = _SCRATCH_BYTES - accumulators * (1 if parts == 1 else 2)
        range_tiles = left // (2 * source.RANGES_IN_FLIGHT * virtual * options.rows * options.columns)
        ranges = _ceil(per_part, min(_RANGE_TILES, max(range_tiles, 4)))
        return cls(
            options=options,
            parts=parts,
            vocabulary_tiles_per_part=per_part,
            row_tiles=per_chunk,
            chunks=chunks,
            range_tiles=_ceil(per_part, ranges),
            ranges=ranges,
            column_tiles=column_tiles,
            tiles_per_item=tiles_per_item,
        )

    @property
    def virtual_tiles(self) -> int:
        return self.parts * self.row_tiles

    @property
    def steps(self) -> int:
        return self.chunks * self.ranges

    @property
    def items(self) -> int:
        return self.steps * self.virtual_tiles * (_ceil(self.range_tiles, self.tiles_per_item) + self.column_tiles)

    @property
    def coefficients(self) -> tuple[int, ...]:
        """Shape of the scratch array of coefficients."""
        in_flight = min(source.RANGES_IN_FLIGHT, self.steps)
        return in_flight, self.virtual_tiles * self.options.rows, self.range_tiles * self.options.columns

    @property
    def partial(self) -> tuple[int, ...]:
        """Shape of the scratch array of gradients, which only several ranges need."""
        rows, columns = self.virtual_tiles * self.options.rows, self.column_tiles * self.options.columns
        return (rows, columns) if self.ranges > 1 else (1,)

    @property
    def scratch_bytes(self) -> int:
        """Of the coefficients and gradients of the ranges in flight."""
        return 2 * _product(self.coefficients) + 4 * _product(self.partial)

    def parameters(self, rows: int, columns: int, vocabulary: int) -> dict[str, int]:
        values = {"rows": rows, "vocabulary": vocabulary, "columns": columns}
        return values | {name: getattr(self, name) for name in source.PARAMETERS if name not in values}


def _ceil(length: int, step: int) -> int:
    return -(-length // step)


def _product(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


def _capability() -> tuple[int, int]:
    info = mx.device_info()
    return int(info["compute_capability_major"]), int(info["compute_capability_minor"])


def _options(weights: HeadWeights) -> source.Options:
    matrix, capability = weights.matrix, _capability()
    wgmma = capability == (9, 0)  # its instructions exist on no other architecture
    # Shared memory of a block: 227 KiB on 9.0, 10.x and 11.x, 163 KiB on 8.0 and 8.7, 99 KiB elsewhere.
    stages = 4 if capability[0] in (9, 10, 11) else 3 if capability in ((8, 0), (8, 7)) else 2
    options = {"softcap": weights.softcap is not None, "bias": weights.bias is not None}
    options |= {"wgmma": wgmma, "stages": stages}
    if not matrix.quantized:
        return source.Options(bits=0, **options)
    scale_type = str(matrix.scales.dtype).removeprefix("mlx.core.")
    aligned = matrix.shape[1] % 256 == 0
    return source.Options(matrix.bits, matrix.group_size, scale_type, aligned=aligned, **options)


def _launch(
    kind: str,
    options: source.Options,
    parameters: dict[str, int],
    inputs: dict[str, mx.array],
    weights: HeadWeights,
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    blocks: tuple[int, int],
    **keywords: object,
) -> list[mx.array]:
    types = {"targets": mx.int32, "cotangent": mx.float32, "peak": mx.float32, "log_sum": mx.float32}
    inputs = {name: value.astype(types.get(name, value.dtype)) for name, value in inputs.items()}
    matrix = weights.matrix
    inputs |= {"weight": matrix.weight}
    if matrix.quantized:
        inputs |= {"scales": matrix.scales, "biases": matrix.biases}
    if weights.bias is not None:
        inputs |= {"bias": weights.bias.astype(mx.float32)}
    inputs |= {
        "parameters": mx.array([parameters.get(name, 0) for name in source.PARAMETERS], mx.int32),
        # A softcap of 1 stands for none: it is read but not used.
        "scaling": mx.array([weights.scale, weights.softcap or 1.0], mx.float32),
    }
    return _kernel(kind, options, tuple(inputs), tuple(outputs))(
        inputs=list(inputs.values()),
        grid=(options.threads * blocks[0], blocks[1], 1),
        threadgroup=(options.threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        **keywords,
    )


@functools.cache
def _kernel(
    kind: str, options: source.Options, input_names: tuple[str, ...], output_names: tuple[str, ...]
) -> Callable[..., list[mx.array]]:
    return mx.fast.cuda_kernel(
        name=source.name(kind, options),
        input_names=list(input_names),
        output_names=list(output_names),
        source=source.body(kind, options),
        header=source.header(options),
        shared_memory=options.shared_memory,
    )

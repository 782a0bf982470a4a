"""Which form computes attention, and how the layers of mlx-lm reach it.

    fused       MLX's own attention; a window or documents are an array mask. With one, or where MLX has no kernel for
                the backward pass, memory grows with length^2
    blockwise   `mlxlab.blockwise`: memory grows with length
    auto        fused where its memory grows with length or the scores are few, else blockwise

A layer gets a `Mask` where it expects an array, and hands it on to `scaled_dot_product_attention`, which its file has
imported from mlx-lm. While a block runs, that name leads here; calls without a `Mask` go on to mlx-lm.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, Mapping, TypeVar

import mlx.core as mx
from mlx_lm.models import base

from mlxlab import backend, blockwise
from mlxlab.errors import CompatError
from mlxlab.interfaces import Block, ModelAdapter, Problem

T = TypeVar("T")

# From so many bytes of scores on, auto prefers blockwise to a form with quadratic memory. A CPU is also faster with it
# from there on; a GPU is not before the scores are so many that starting more kernels is paid for.
AUTO_BYTES = {"cpu": 1 << 20, "metal": 64 << 20, "cuda": 64 << 20}

_NAME = "scaled_dot_product_attention"
_LOCK = threading.RLock()  # one thread at a time binds the name
_METAL_HEADS = (64, 72, 80, 96, 128, 192, 256)  # head sizes of the fused backward pass on Metal


@dataclass
class Mask:
    """Which keys the queries of a stream see: those up to their own position, within a window and a document.

    Args:
        length: number of queries; the first one stands at `offset`, so there are offset + length keys.
        window: how many keys a query may see, itself among them; None: all.
        starts: first position of the document of each query, int32 [B, length]; None: all is one document.
        longest: no document has more tokens.
    """

    length: int
    offset: int = 0
    window: int | None = None
    starts: mx.array | None = None
    longest: int | None = None
    used: bool = field(default=False, init=False)  # it has reached `_attend`

    @property
    def causal(self) -> bool:
        """Nothing is hidden but what comes later."""
        return self.starts is None and (self.window is None or self.offset + self.length <= self.window)

    def plain(self) -> mx.array | str | None:
        """What MLX takes: "causal", None for a single query, or bool [L, K] or [B, 1, L, K]."""
        if self.causal:
            return "causal" if self.length > 1 else None
        mask = base.create_causal_mask(self.length, offset=self.offset, window_size=self.window)
        if self.starts is not None:
            mask = mask & (mx.arange(self.offset + self.length) >= self.starts[:, None, :, None])
        return mask

    def __str__(self) -> str:
        window = f"window {self.window}" if self.window is not None and self.window < self.offset + self.length else ""
        documents = "documents" if self.starts is not None else ""
        return " and ".join(filter(None, [window, documents])) or "causal"


class Router:
    """Runs blocks so that their attention takes the wanted form.

    Args:
        wanted: "auto", "fused" or "blockwise".
    """

    def __init__(self, wanted: str):
        self.wanted = wanted
        self.chosen: Counter[str] = Counter()  # form and mask -> calls
        self._files: dict[int, tuple[ModuleType, ...]] = {}

    @property
    def blockwise_calls(self) -> int:
        """How often the blockwise form was taken."""
        return sum(calls for what, calls in self.chosen.items() if what.startswith("blockwise"))

    def run(self, adapter: ModelAdapter, block: Block, attention: Any, call: Callable[[], T]) -> T:
        """The result of `call()`, which runs `block` with `attention` (a `mlxlab.attention.StreamAttention`).

        Raises:
            CompatError: attention=blockwise, and the block computes attention in a way of its own.
        """
        if self.wanted == "fused":
            return call()
        if block.index not in self._files:
            self._files[block.index] = _files(adapter, block)
        files = self._files[block.index]
        if not files and self.wanted == "auto":
            return call()
        attention.masks, error = [], None
        try:
            with _bound(files, self._attend):
                result = call()
            if files or not attention.masks:
                return result
        except (TypeError, ValueError, AttributeError) as caught:
            if not attention.masks or attention.masks[-1].used:
                raise
            error = caught  # something took the mask for an array
        if self.wanted == "blockwise":
            raise CompatError(
                f"attention=blockwise does not reach layer {block.index} ({block.path}): family "
                f"{type(adapter).__name__} computes attention in a way of its own there; use attention=fused."
            ) from error
        self._files[block.index], attention.masks = (), None
        return call()

    def _attend(self, queries, keys, values, cache, scale, mask, sinks=None):
        if not isinstance(mask, Mask):
            return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
        mask.used = True
        form = choose(self.wanted, mask, queries, keys, values)
        self.chosen[f"{form} ({mask})"] += 1
        if form == "fused":
            return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask.plain(), sinks)
        options = {"window": mask.window, "starts": mask.starts, "longest": mask.longest, "sinks": sinks}
        return blockwise.attention(queries, keys, values, scale=scale, **options)


def choose(wanted: str, mask: Mask, queries: mx.array, keys: mx.array, values: mx.array) -> str:
    """ "fused" or "blockwise", for arrays [B, heads, L, D]; only their shapes and dtypes matter."""
    if wanted != "auto":
        return wanted
    b, heads, length, _ = queries.shape
    score_bytes = b * heads * length * keys.shape[2] * queries.dtype.size
    if score_bytes < AUTO_BYTES[backend.device()] or (mask.causal and fused_is_linear(queries, values)):
        return "fused"
    return "blockwise"


def fused_is_linear(queries: mx.array, values: mx.array) -> bool:
    """Whether MLX's backward pass for mask="causal" is a kernel whose memory grows with length.

    On CUDA: cuDNN's, for half precision, heads of up to 128 in steps of 8, and lengths that are multiples of 128. On
    Metal: since MLX 0.32.4, for some head sizes. On a CPU there is none.
    """
    device, sizes = backend.device(), (queries.shape[-1], values.shape[-1])
    if device == "cuda":
        half = queries.dtype in (mx.float16, mx.bfloat16)
        return half and queries.shape[2] % 128 == 0 and all(size <= 128 and size % 8 == 0 for size in sizes)
    return device == "metal" and _mlx() >= (0, 32, 4) and sizes[0] == sizes[1] and sizes[0] in _METAL_HEADS


def problems(wanted: str, model_config: Mapping[str, Any]) -> Iterable[Problem]:
    """Whether attention=blockwise can reach the file that mlx-lm has for a config.json."""
    from mlx_lm.utils import _get_classes

    if wanted != "blockwise":
        return
    try:
        model, _ = _get_classes(dict(model_config))
    except ValueError:  # a family that mlx-lm does not have
        return
    if not any(_reachable(file) for file in _related(sys.modules[model.__module__])):
        yield Problem(
            f"attention=blockwise cannot be used with model_type {model_config.get('model_type')!r}, whose file in "
            "mlx-lm computes attention in a way of its own",
            "use attention=fused",
        )


@contextmanager
def _bound(files: Iterable[ModuleType], function: Callable) -> Iterator[None]:
    """The name leads to `function` in some modules, and to mlx-lm again afterwards."""
    with _LOCK:
        before = [(file, getattr(file, _NAME)) for file in files]
        try:
            for file, _ in before:
                setattr(file, _NAME, function)
            yield
        finally:
            for file, old in before:
                setattr(file, _NAME, old)


def _files(adapter: ModelAdapter, block: Block) -> tuple[ModuleType, ...]:
    """Modules of a block's classes, and of its adapter's, that call mlx-lm's attention by its name."""
    classes = [type(module) for _, module in block.module.named_modules()] + list(type(adapter).__mro__)
    names = dict.fromkeys(cls.__module__ for cls in classes)
    return tuple(sys.modules[name] for name in names if name in sys.modules and _reachable(sys.modules[name]))


def _reachable(file: ModuleType) -> bool:
    return file is not base and getattr(file, _NAME, None) is base.scaled_dot_product_attention


def _related(file: ModuleType) -> set[ModuleType]:
    """A model file and the model files that it takes classes or modules from."""
    found, new = set(), [file]
    while new:
        found.add(current := new.pop())
        for value in vars(current).values():
            other = value
            if not isinstance(value, ModuleType):
                other = sys.modules.get(getattr(value, "__module__", None) or "")
            if other is not None and other.__name__.startswith("mlx_lm.models.") and other not in found:
                new.append(other)
    return found


def _mlx() -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version("mlx").split(".")[:3] if part.isdigit())

"""Options that belong to no component: how a checkpoint computes, how long training lasts, seed and output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

DTYPES = ("auto", "float32", "bfloat16", "float16")
LINEAR_POLICIES = ("auto", "fused", "dequantize", "resident")
ATTENTION_FORMS = ("auto", "fused", "blockwise")  # the first one is the default


@dataclass(frozen=True)
class ModelConfig:
    """How a checkpoint computes.

    Args:
        dtype: of activations and unquantized weights: "auto" (float32 on a CPU, bfloat16 on a GPU),
            "float32", "bfloat16", "float16".
        linear: products with quantized weights: "auto" (by device and rows), "fused" (MLX's quantized kernels),
            "dequantize" (weights expanded for each product), "resident" (expanded once, kept; most memory).
    """

    dtype: str = "auto"
    linear: str = "auto"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("linear", self.linear, LINEAR_POLICIES)


@dataclass(frozen=True)
class TrainConfig:
    """How long, in which portions, and what is reported.

    Args:
        iters: length in updates of the optimizer, >= 0; null: by `epochs`. Only one of the two may be given.
        epochs: length in passes over the training rows, > 0; null: 1.
        batch_size: rows per micro-batch, >= 1; null: 2, unless `batch_tokens` is given. Only one of the two may be.
        batch_tokens: as many rows per micro-batch as have at most so many tokens: rows times branches times length of
            the longest row (rounded, see mlxlab/data/batches.py); a row that is longer alone is one of its own.
        accumulate: micro-batches per update, >= 1.
        clip_norm: gradients of an update are scaled down to this global norm; 0: never.
        report_every: updates between two reports of training metrics, >= 1.
        validate_every: updates between two validations; 0: only before the first and after the last update.
        validate_rows: validation rows that are used, from the top; 0: all.
        checkpoint_every: updates between two checkpoints; 0: none (the best and the last adapter are always kept, and
            an interrupted run leaves one).
        resume: continue from a checkpoint: a run folder (its last checkpoint), a checkpoint folder, or "latest" (of the
            latest run in output_dir that has one). Give the options of that run again; the new run has its own folder.
        best_metric: validation metric by which best/ is chosen, such as "loss", "accuracy" or "margin". More is better
            for names that begin with accuracy, margin, reward or logp (unless they end in rejected), else less.
        early_stop_patience: end training after so many validations in a row without a better `best_metric`; 0: never.
        samples: prompts whose answers are generated before and after training; 0: none.
        sample_tokens: length limit of such an answer in tokens, >= 1.
    """

    iters: int | None = None
    epochs: float | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    accumulate: int = 1
    clip_norm: float = 1.0
    report_every: int = 10
    validate_every: int = 50
    validate_rows: int = 0
    checkpoint_every: int = 0
    resume: str | None = None
    best_metric: str = "loss"
    early_stop_patience: int = 0
    samples: int = 3
    sample_tokens: int = 48

    def __post_init__(self) -> None:
        if self.iters is not None and self.epochs is not None:
            raise ValueError(
                f"iters={self.iters} and epochs={self.epochs} both give the length; set one of them to null"
            )
        if self.iters is not None:
            _at_least("iters", self.iters, 0)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be > 0 and finite, got {self.epochs}")
        if not 0 <= self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be >= 0 (0: no clipping) and finite, got {self.clip_norm}")
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                f"batch_size={self.batch_size} and batch_tokens={self.batch_tokens} both give the size of a "
                "micro-batch; set one of them to null"
            )
        if self.batch_tokens is not None:
            _at_least("batch_tokens", self.batch_tokens, 1)
        elif self.batch_size is None:
            object.__setattr__(self, "batch_size", 2)
        for name in ("batch_size", "accumulate", "report_every", "sample_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("validate_every", "validate_rows", "checkpoint_every", "samples", "early_stop_patience"):
            _at_least(name, getattr(self, name), 0)
        if self.resume == "" or not self.best_metric:
            empty = "resume" if self.resume == "" else "best_metric"
            raise ValueError(f"{empty} must not be empty; leave it out, or give a value")
        if self.early_stop_patience and not self.validate_every:
            raise ValueError(
                f"early_stop_patience={self.early_stop_patience} counts validations, and validate_every=0 makes none "
                "during training; give validate_every"
            )
        if not self.samples and self.sample_tokens != type(self).sample_tokens:
            raise ValueError(f"sample_tokens={self.sample_tokens} has no effect with samples=0; leave it out")

    def updates(self, batches_per_epoch: int) -> int:
        """Number of optimizer updates for data of so many micro-batches."""
        if self.iters is not None:
            return self.iters
        epochs = 1.0 if self.epochs is None else self.epochs
        return math.ceil(epochs * batches_per_epoch / self.accumulate)

    def without_effect(self, updates: int, validation_rows: int) -> Iterator[str]:
        """A sentence for each option that would do nothing in a run of so many updates and validation rows."""
        if 0 < updates < self.checkpoint_every:
            yield (
                f"train.checkpoint_every={self.checkpoint_every} is more than the {updates} updates of this run, so "
                f"there would be no checkpoint; give {updates} or less"
            )
        if validation_rows == 0:
            for name in ("validate_rows", "early_stop_patience", "best_metric"):
                value, default = getattr(self, name), getattr(type(self), name)
                if value != default:
                    yield f"train.{name}={value} needs validation rows, and there are none; add them, or leave it out"
        elif self.early_stop_patience and 0 < updates <= self.early_stop_patience * self.validate_every:
            yield (
                f"train.early_stop_patience={self.early_stop_patience} with train.validate_every={self.validate_every} "
                f"could end training after {self.early_stop_patience * self.validate_every} updates at the earliest, "
                f"and this run has {updates}; give smaller values"
            )


@dataclass(frozen=True)
class TopConfig:
    """Options that stand at the top.

    Args:
        seed: of data order, LoRA initialization and dropout, 0 <= seed < 2^32.
        output_dir: folder in which run folders are made, relative to where the program is started.
        attention: "auto" (the one of the others that fits), "fused" (MLX's; where a window or documents need an array
            mask, or the backend has no kernel for the backward pass, memory grows with length^2) or "blockwise" (memory
            grows with length).
    """

    seed: int = 0
    output_dir: str = "outputs"
    attention: str = ATTENTION_FORMS[0]

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be >= 0 and < 2^32, got {self.seed}")
        if not self.output_dir:
            raise ValueError("output_dir must not be empty; the default is outputs")
        _one_of("attention", self.attention, ATTENTION_FORMS)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: int, minimum: int) -> None:
    if not value >= minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")

"""The contracts between the axes, and the data they exchange.

Words with one meaning
    branch   one token sequence of an example: "completion", or "chosen" and "rejected"
    part     which tokens of a branch: "prompt" or "response"
    span     (branch, part): what a method asks to be scored
    stream   a token array [B, T] that goes through the blocks; a stream with a parent continues the parent's tokens
    row      one scored position: hidden vector in, log-probability of its target token out
    group    streams that see one another; groups are independent and may run one after the other
    stage    a block, or half of one, as a pure function of (parameters, carry, constants)
    carry    what one stage hands to the next, per stream: {"h": hidden, "kv_3": (keys, values), ...}
    edge     a carry kept between segments

Letters: B rows of a batch, T tokens of a stream, L tokens of a sequence, H hidden size, V vocabulary, M scored rows.
Log-probabilities are natural logarithms in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Iterable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxlab.settings import ATTENTION_FORMS

if TYPE_CHECKING:
    from mlxlab.heads.weights import HeadWeights
    from mlxlab.program import Program

Params = dict[str, mx.array]  # flat path of a trainable leaf -> array
State = dict[str, Any]  # of one stream inside the blocks; "h" is the hidden state [B, T, H]
Constants = dict[str, mx.array]  # of one stream; never differentiated
Span = tuple[str, str]  # (branch, part)
GRANULARITIES = ("block", "half")  # of stages
Metrics = dict[str, mx.array]  # scalars, float32


# ---------------------------------------------------------------------------------------------- capability checks
@dataclass(frozen=True)
class Problem:
    """Why a combination is impossible (`sentence`), and what to write instead (`remedy`)."""

    sentence: str
    remedy: str


@dataclass(frozen=True)
class Setup:
    """Everything that is known before weights are loaded; components read it in `check`.

    Checked twice: before the checkpoint is fetched (`family` and `model_config` are None), and with its config.json.
    """

    method: Method
    head: Head
    backward: Backward
    layout: Layout
    lora: Any  # mlxlab.lora.LoraConfig
    batch_size: int
    device: str  # "metal", "cuda" or "cpu"
    family: type[ModelAdapter] | None = None
    model_config: Mapping[str, Any] | None = None  # config.json of the checkpoint
    attention: str = ATTENTION_FORMS[0]


@dataclass(frozen=True)
class Component(ABC):
    """A final, frozen dataclass: its fields are its options, its docstring is its help.

    `__post_init__` checks ranges with ValueError; `check` names what it cannot work with.
    """

    def check(self, setup: Setup) -> Iterable[Problem]:
        """Problems of this component in `setup`; none when it can run."""
        return ()


# ----------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class TokenSequence:
    """One branch of one example.

    Args:
        ids: token ids, int32 [L], exactly the stream that inference would see.
        response: bool [L], True where the token belongs to the response (is a target).
    """

    ids: np.ndarray
    response: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised(self) -> int:
        """Number of response tokens that can be predicted (position 0 never can)."""
        return int(self.response[1:].sum())


@dataclass(frozen=True)
class Example:
    """One row of a data set: its branches, and where it came from (`train.jsonl:12`)."""

    branches: Mapping[str, TokenSequence]
    source: str = ""


@dataclass(frozen=True)
class Stream:
    """Token ids [B, T] (right-padded) and the name of the stream that they continue, if any.

    `rows` says which rows of the batch the B rows are, in order. With a parent, both have the same rows.

    `documents` int32 [B, T] says which document of its row each token belongs to; tokens see those of their own only.
    The tokens of a document are neighbours; -1 is padding. Such a stream has no parent, and its `rows` are empty.
    None: each row is one document.
    """

    ids: np.ndarray
    rows: tuple[int, ...]
    parent: str | None = None
    documents: np.ndarray | None = None


@dataclass(frozen=True)
class SpanRows:
    """Where the scored positions of one span are, as numpy arrays of length m.

    Args:
        branch, part: the span.
        stream: index into `StreamPlan.streams` order, int32 [m].
        index: flat position b * T + t in that stream, int32 [m].
        target: token id to be predicted there, int32 [m].
        row: row of the batch, int32 [m].
    """

    branch: str
    part: str
    stream: np.ndarray
    index: np.ndarray
    target: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class StreamPlan:
    """What a layout makes of a batch; pure numpy, so that every shape is known before any computation.

    Args:
        streams: name -> Stream; parents come before their children.
        groups: names of streams that see one another, parents first; together all streams.
        spans: the scored positions.
        batch_rows: B of the batch.
        tokens: real (not padded) tokens that go through the blocks.
    """

    streams: Mapping[str, Stream]
    groups: Sequence[Sequence[str]]
    spans: Sequence[SpanRows]
    batch_rows: int
    tokens: int


@dataclass(frozen=True)
class Totals:
    """Denominators of one update (or one validation pass), over all of its micro-batches.

    A loss divides by these instead of by its own counts, so that micro-batches simply add up.
    """

    rows: int
    tokens: Mapping[Span, int]

    @classmethod
    def of(cls, examples: Iterable[Example], spans: Mapping[str, frozenset[str]]) -> Totals:
        tokens: dict[Span, int] = {}
        rows = 0
        for example in examples:
            rows += 1
            for branch, parts in spans.items():
                sequence = example.branches[branch]
                counts = {"response": sequence.supervised, "prompt": len(sequence) - 1 - sequence.supervised}
                for part in parts:
                    tokens[branch, part] = tokens.get((branch, part), 0) + counts[part]
        return cls(rows, tokens)


@dataclass(frozen=True)
class TokenLogps:
    """Log-probabilities of one span: `values` float32 [m], `row` int32 [m] (which row of the batch), B rows."""

    values: mx.array
    row: mx.array
    batch_rows: int

    def sum(self) -> mx.array:
        """Per row of the batch: summed log-probability, float32 [B]."""
        return mx.where(self._mine(), self.values[None], 0.0).sum(axis=1)

    def count(self) -> mx.array:
        """Per row of the batch: number of scored tokens, float32 [B]."""
        return self._mine().sum(axis=1).astype(mx.float32)

    def mean(self) -> mx.array:
        """Per row of the batch: mean log-probability per token, float32 [B]."""
        return self.sum() / mx.maximum(self.count(), 1)

    def _mine(self) -> mx.array:
        """bool [B, m]: which values belong to which row. A mask, not a scatter, whose additions would collide."""
        return self.row[None] == mx.arange(self.batch_rows)[:, None]


@dataclass(frozen=True)
class Scores:
    """What a method sees of a micro-batch: log-probabilities by span, and the denominators of the whole update."""

    spans: Mapping[Span, TokenLogps]
    totals: Totals

    def __getitem__(self, span: Span) -> TokenLogps:
        return self.spans[span]

    def token_mean(self, *spans: Span) -> mx.array:
        """This micro-batch's share of the mean log-probability over all tokens of the update in `spans`; scalar."""
        total = sum(self.totals.tokens[span] for span in spans)
        return sum(self.spans[span].values.sum() for span in spans) / max(total, 1)

    def row_mean(self, values: mx.array) -> mx.array:
        """This micro-batch's share of the mean of per-row `values` [B] over all rows of the update; scalar."""
        return values.astype(mx.float32).sum() / self.totals.rows


# -------------------------------------------------------------------------------------------------------- methods
@dataclass(frozen=True)
class Method(Component):
    """A training objective: log-probabilities in, loss out. Knows nothing of models, heads, masks or memory."""

    records: ClassVar[str]  # kind of data: "completion" or "preference"
    branches: ClassVar[tuple[str, ...]]
    needs_reference: ClassVar[bool] = False  # also scores the batch with LoRA off
    linear: ClassVar[bool] = False  # the loss is linear in the log-probabilities: its gradient is known in advance
    learning_rate: ClassVar[float]  # default peak learning rate with LoRA

    @abstractmethod
    def spans(self) -> Mapping[str, frozenset[str]]:
        """Which parts of which branches must be scored."""

    @abstractmethod
    def loss(self, scores: Scores, reference: Scores | None) -> tuple[mx.array, Metrics]:
        """Loss (scalar float32) and metrics of a micro-batch, both as shares that add up over an update.

        `reference` holds the same spans scored with LoRA off, without gradient, for methods that ask for it.
        """


# ---------------------------------------------------------------------------------------------------------- heads
@dataclass(frozen=True)
class Head(Component):
    """Turns hidden rows into log-probabilities of their targets. Rows are independent of one another."""

    compiles: ClassVar[bool] = True  # False: is one kernel, or a long chain that mx.compile takes very long for

    @abstractmethod
    def __call__(self, hidden: mx.array, targets: mx.array, weights: HeadWeights) -> mx.array:
        """Differentiable in `hidden`.

        Args:
            hidden: final-normed hidden states [M, H].
            targets: token ids, int32 [M].
            weights: the frozen output projection.

        Returns:
            log-probabilities, float32 [M].
        """

    def rows_per_call(self, rows: int) -> int:
        """How many of `rows` a caller that evaluates piece by piece should pass at once (bounds temporaries)."""
        return rows


# --------------------------------------------------------------------------------------------------------- memory
@dataclass(frozen=True)
class StepResult:
    """Evaluated results of one micro-batch; `grads` has the keys of the parameters that were passed."""

    loss: mx.array
    metrics: Metrics
    grads: Params


@dataclass(frozen=True)
class Backward(Component):
    """A way to get gradients out of a program: trades recomputation for memory, never changes the result."""

    @property
    def granularity_of_stages(self) -> str:
        """ "block", or "half" for stages of half a block (attention, feed-forward)."""
        return "block"

    @abstractmethod
    def __call__(self, program: Program, params: Params) -> StepResult:
        """Loss, metrics and gradients, evaluated together; keeps no reference to intermediate carries."""


@dataclass(frozen=True)
class Layout(Component):
    """A way to lay the branches of a batch out as token streams; never changes the result."""

    @abstractmethod
    def plan(self, batch: Sequence[Example], spans: Mapping[str, frozenset[str]]) -> StreamPlan:
        """Streams and scored rows of a batch."""


# --------------------------------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class Block:
    """One decoder layer: its index, its path in the weight file (`model.layers.3`) and its module."""

    index: int
    path: str
    module: nn.Module


class Attention(ABC):
    """What a block may ask for while it processes one stream (built by the engine)."""

    length: int  # T of this stream
    offset: int  # position of its first token
    cache: Any  # object of mlx-lm's cache protocol, or None: pass it to the layer

    @abstractmethod
    def mask(self, window: int | None = None) -> mx.array | str | None:
        """Mask for mlx-lm's layers: "causal", None for a single token, or bool [T, offset + T] with a window.

        Hand it on as it is: where `mlxlab.attend` computes attention, it is a `Mask` instead.
        """


class ModelAdapter(ABC):
    """How one model family is walked block by block. One file per family; final classes.

    Class attributes: `model_types` (values of `model_type` in config.json) and `features`, a subset of
    "prefix_cache" (attention goes through mlx-lm's cache protocol, so streams can continue one another),
    "packing" (tokens meet in attention only, and its weights depend on their distance but not on their positions, so a
    stream can hold several documents) and "half_blocks" (`run_half` exists). `lacks` says of a missing feature why it
    is missing. `lora_targets` are the linear layers that get LoRA where the user names none. `compiles`: mx.compile of a
    block was seen to end soon on a GPU (that of a Gemma 4 block took minutes). The docstring's first line stands in
    `mlxlab models`.
    """

    model_types: ClassVar[tuple[str, ...]]
    features: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[Mapping[str, str]] = {}
    compiles: ClassVar[bool] = False
    lora_targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )

    def __init__(self, model: nn.Module, policy: str = "auto"):
        """`policy` says how products with quantized weights are computed (`mlxlab.linear`)."""
        self.model, self.policy = model, policy

    @abstractmethod
    def embed(self, ids: mx.array) -> tuple[State, Constants]:
        """Token ids [B, T] -> state with "h" [B, T, H], and constants that later blocks read."""

    @abstractmethod
    def blocks(self) -> Sequence[Block]:
        """The decoder layers in order."""

    @abstractmethod
    def run(self, block: Block, state: State, constants: Constants, attention: Attention) -> State:
        """One block. Values that later blocks need join the state under names without dots, such as "kv_3"."""

    def run_half(self, block: Block, half: int, state: State, constants: Constants, attention: Attention) -> State:
        """Half a block: 0 is attention with its residual, 1 the rest. Only with feature "half_blocks"."""
        raise NotImplementedError(f"{type(self).__name__} has no half blocks")

    @abstractmethod
    def finish(self, state: State) -> mx.array:
        """Final norm: state -> hidden [B, T, H]."""

    @abstractmethod
    def head_weights(self) -> HeadWeights:
        """The output projection with everything that follows it (bias, logit scale, softcap)."""

    @classmethod
    def problems(cls, model_config: Mapping[str, Any]) -> Iterable[Problem]:
        """What of a checkpoint's configuration this adapter cannot do."""
        return ()

    @classmethod
    def without(cls, feature: str) -> str:
        """Such as "needs the model feature half_blocks, which family Phi lacks (because ...)", for a `Problem`."""
        reason = f" ({cls.lacks[feature]})" if feature in cls.lacks else ""
        return f"needs the model feature {feature}, which family {cls.__name__} lacks{reason}"


@dataclass(frozen=True)
class ModelSource(Component):
    """Where a checkpoint comes from: options in, a local folder in mlx-lm's format out."""

    @abstractmethod
    def folder(self) -> Path:
        """The local folder; downloads or converts on first use, into a cache, atomically."""

    def tokenizer_folder(self) -> Path:
        """A local folder with the same tokenizer; weights may be missing there."""
        return self.folder()

"""Blockwise attention against plain arithmetic, which form is taken, and how the layers of mlx-lm reach it."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, gemma2, llama

from mlxlab import attend, backend, blockwise, compat
from mlxlab.attend import Mask, Router
from mlxlab.attention import StreamAttention, document_starts
from mlxlab.engine import StepEngine
from mlxlab.errors import CompatError
from mlxlab.heads.fused import Fused
from mlxlab.interfaces import Block, Setup
from mlxlab.lora import LoraConfig, apply_lora
from mlxlab.memory.backward.checkpoint import Checkpoint
from mlxlab.memory.backward.plain import Plain
from mlxlab.memory.backward.segmented import Segmented
from mlxlab.memory.layouts.packed import Packed
from mlxlab.memory.layouts.prefix_shared import PrefixShared
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.orpo import Orpo
from mlxlab.methods.sft import Sft
from mlxlab.models.decoder import Llama
from mlxlab.models.gemma4 import Gemma4
from mlxlab.models.load import load
from mlxlab.models.tiny import VOCABULARY, TinyGemma4, TinyLlama
from mlxlab.testing import parity, random_examples, randomize, reference_step

SCALE = 0.3
TOLERANCE = 1e-5  # float32, relative norm


# ---------------------------------------------------------------------------------------------------------- arithmetic
def plain(queries, keys, values, sinks=None, *, window=None, starts=None, softcap=None):
    """Attention written out, with the whole matrix of scores."""
    repeats, offset = queries.shape[1] // keys.shape[1], keys.shape[2] - queries.shape[2]
    keys, values = mx.repeat(keys, repeats, axis=1), mx.repeat(values, repeats, axis=1)
    scores = SCALE * queries @ keys.swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    row, column = mx.arange(offset, keys.shape[2])[:, None], mx.arange(keys.shape[2])[None]
    seen = (column <= row) & (row - column < (window or 10**6))
    seen = mx.broadcast_to(seen, (queries.shape[0], 1, *seen.shape))
    if starts is not None:
        seen = seen & (column >= starts[:, None, :, None])
    scores = mx.where(seen, scores, -1e9)
    if sinks is not None:
        column = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : keys.shape[2]]
    return mx.where(seen.any(-1, keepdims=True), weights, 0) @ values


def tensors(b=1, heads=4, groups=2, length=37, keys=None, d=8, dv=8, dtype=mx.float32, seed=0):
    """Queries, keys, values and a cotangent."""
    keys = keys or length
    shapes = [(b, heads, length, d), (b, groups, keys, d), (b, groups, keys, dv), (b, heads, length, dv)]
    random = mx.random.split(mx.random.key(seed), 4)
    return [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, random)]


def documents(b, length, *lengths):
    """Starts of documents of these lengths, one after the other; further rows have one less of the first."""
    rows = [np.repeat(np.arange(len(lengths)), [lengths[0] - row, *lengths[1:]]) for row in range(b)]
    rows = [np.pad(row, (0, length - len(row)), constant_values=-1) for row in rows]
    return document_starts(np.stack(rows).astype(np.int32))


def differences(ours, theirs, arguments, cotangent):
    """Relative norms of the differences of the output and of all gradients."""
    results = [mx.vjp(function, arguments, [cotangent]) for function in (ours, theirs)]
    pairs = zip(*[[*outputs, *gradients] for outputs, gradients in results])
    norm = lambda x: mx.linalg.norm(x.astype(mx.float32)).item()
    return [norm(a.astype(mx.float32) - b.astype(mx.float32)) / norm(b) for a, b in pairs]


SHAPES = {
    "grouped heads": {},
    "a head for each group": {"b": 2, "heads": 2, "length": 64, "d": 16},
    "values of another size": {"heads": 6, "length": 33, "d": 16, "dv": 8},
    "queries that continue": {"b": 2, "length": 30, "keys": 75},
    "one query": {"length": 1, "keys": 50},
    "more queries than keys": {"b": 2, "length": 50, "keys": 41},
    "many tiles": {"length": 301},
}


@pytest.mark.parametrize("step_bytes", [1, 30_000, 1 << 30], ids=["smallest tiles", "batches", "one step"])
@pytest.mark.parametrize("window", [None, 2, 16, 45])
@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
def test_values_and_gradients(shape, window, step_bytes):
    *arguments, cotangent = tensors(**shape)
    ours = lambda *x: blockwise.attention(*x, scale=SCALE, window=window, step_bytes=step_bytes)
    found = differences(ours, lambda *x: plain(*x, window=window), arguments, cotangent)
    assert max(found) < TOLERANCE, found


@pytest.mark.parametrize("step_bytes", [1, 30_000, 1 << 30])
@pytest.mark.parametrize("window", [None, 7])
def test_documents(window, step_bytes):
    *arguments, cotangent = tensors(b=2, length=150)
    starts, _ = documents(2, 150, 40, 3, 17, 1, 39, 41)
    starts = mx.array(starts)
    options = {"scale": SCALE, "window": window, "starts": starts, "step_bytes": step_bytes}
    theirs = lambda *x: plain(*x, window=window, starts=starts)
    for longest in (None, 64, 41):
        ours = lambda *x: blockwise.attention(*x, longest=longest, **options)
        found = differences(ours, theirs, arguments, cotangent)
        assert max(found) < TOLERANCE, (longest, found)
    if window is None and step_bytes == 1:  # the bound is what leaves tiles out: with a wrong one, keys are missed
        wrong = lambda *x: blockwise.attention(*x, longest=5, **options)
        assert max(differences(wrong, theirs, arguments, cotangent)) > 1000 * TOLERANCE


def test_a_document_is_computed_as_if_it_were_alone():
    *arguments, cotangent = tensors(length=60)
    starts = mx.array(documents(1, 60, 25, 35)[0])
    together, gradients = mx.vjp(
        lambda *x: blockwise.attention(*x, scale=SCALE, starts=starts, longest=64, step_bytes=1), arguments, [cotangent]
    )
    for part in (slice(0, 25), slice(25, 60)):
        alone, expected = mx.vjp(lambda *x: plain(*x), [x[:, :, part] for x in arguments], [cotangent[:, :, part]])
        for a, b in zip([*together, *gradients], [*alone, *expected]):
            assert mx.allclose(a[:, :, part], b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("softcap, sinks", [(2.0, False), (None, True), (2.0, True)])
def test_softcap_and_sinks(softcap, sinks):
    *arguments, cotangent = tensors(b=2, length=50)
    arguments += [mx.array([0.5, -1.0, 2.0, 0.0])] if sinks else []
    for window, step_bytes in itertools.product([None, 9], [1, 1 << 30]):
        ours = lambda q, k, v, s=None: blockwise.attention(
            q, k, v, scale=SCALE, window=window, softcap=softcap, sinks=s, step_bytes=step_bytes
        )
        found = differences(ours, lambda *x: plain(*x, window=window, softcap=softcap), arguments, cotangent)
        assert max(found) < TOLERANCE, found


@pytest.mark.parametrize("keys", [40, 61])
def test_mlx_agrees(keys):
    *arguments, cotangent = tensors(length=40, keys=keys)
    for mask in (Mask(40, keys - 40), Mask(40, keys - 40, window=11)):
        ours = lambda *x: blockwise.attention(*x, scale=SCALE, window=mask.window, step_bytes=1)
        theirs = lambda *x: mx.fast.scaled_dot_product_attention(*x, scale=SCALE, mask=mask.plain())
        assert max(differences(ours, theirs, arguments, cotangent)) < TOLERANCE


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
    """Queries before the first key, and queries whose document starts after them; in between all is as usual."""
    *arguments, cotangent = tensors(length=50, keys=41)
    starts = np.zeros((1, 50), np.int32)
    starts[0, [20, 49]] = 45
    starts = mx.array(starts)
    for step_bytes in (1, 1 << 30):
        ours = lambda *x: blockwise.attention(*x, scale=SCALE, starts=starts, step_bytes=step_bytes)
        found = differences(ours, lambda *x: plain(*x, starts=starts), arguments, cotangent)
        assert max(found) < TOLERANCE
        (output,), (d_queries, d_keys, d_values) = mx.vjp(ours, arguments, [cotangent])
        empty = mx.array([*range(9), 20, 49])
        assert not output[:, :, empty].any() and not d_queries[:, :, empty].any()
        assert all(mx.isfinite(x).all() for x in (output, d_queries, d_keys, d_values))


def test_padding_of_unequal_rows():
    """Lengths 3 and 9 in one batch: each row as if it were alone, and nothing is NaN."""
    *arguments, cotangent = tensors(b=2, length=9)
    starts = np.zeros((2, 9), np.int32)
    starts[0, 3:] = 9  # padding sees no key at all
    starts, cotangent = mx.array(starts), cotangent.at[0, :, 3:].multiply(0)
    (output,), gradients = mx.vjp(
        lambda *x: blockwise.attention(*x, scale=SCALE, starts=starts), arguments, [cotangent]
    )
    assert all(mx.isfinite(x).all() for x in (output, *gradients))
    for row, length in enumerate((3, 9)):
        part = lambda x: x[row : row + 1, :, :length]
        (alone,), expected = mx.vjp(lambda *x: plain(*x), [part(x) for x in arguments], [part(cotangent)])
        for a, b in zip([output, *gradients], [alone, *expected]):
            assert mx.allclose(part(a), b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_precision_is_as_good_as_the_plain_form(dtype):
    *arguments, cotangent = tensors(length=256, d=64, dv=64, dtype=dtype)
    exact = [x.astype(mx.float32) for x in arguments]
    outputs, gradients = mx.vjp(lambda *x: plain(*x, window=40), exact, [cotangent.astype(mx.float32)])
    mask = Mask(256, window=40).plain()
    forms = [
        lambda *x: blockwise.attention(*x, scale=SCALE, window=40, step_bytes=100_000),
        lambda *x: mx.fast.scaled_dot_product_attention(*x, scale=SCALE, mask=mask),
    ]
    norms = []
    for form in forms:
        results = mx.vjp(form, arguments, [cotangent])
        found = [*results[0], *results[1]]
        assert all(x.dtype == dtype for x in found)
        pairs = zip(found, [*outputs, *gradients])
        norms.append([mx.linalg.norm(a.astype(mx.float32) - b).item() for a, b in pairs])
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(*norms)), norms


def test_sums_are_float32_whatever_the_inputs():
    scores = mx.random.normal((3, 1000), key=mx.random.key(0)).astype(mx.bfloat16)
    weights, total, sums = blockwise._probabilities(None, scores, mx.zeros((1000,)), None)
    exact = mx.logsumexp(scores.astype(mx.float32), axis=-1, keepdims=True)
    assert weights.dtype == mx.bfloat16 and total.dtype == sums.dtype == mx.float32
    assert mx.allclose(sums, exact, rtol=0, atol=1e-5)


def test_large_scores_in_float16_do_not_overflow():
    queries, keys, values, _ = tensors(length=8, d=64, dv=64, dtype=mx.float16)
    output = blockwise.attention(60 * queries, 60 * keys, values, scale=1 / 64)
    assert mx.isfinite(output).all()


# --------------------------------------------------------------------------------------------------------------- cost
@pytest.mark.parametrize(
    "queries, keys, window", [(64, 64, None), (300, 300, 40), (100, 400, 17), (41, 50, 5), (7, 7, 1)]
)
@pytest.mark.parametrize("step_bytes", [1, 20_000, 1 << 30])
def test_steps_cover_what_is_visible_and_little_more(queries, keys, window, step_bytes):
    offset, covered = keys - queries, np.zeros((queries, keys), int)
    for step in blockwise.steps(queries, keys, window, 16, step_bytes):
        for tile in range(step.tiles):
            row, column = step.start + tile * step.tile, step.first + tile * step.tile
            covered[row : row + step.tile, column : column + step.width] += 1
        size = step.tile * step.width * 16
        assert step.tiles * size <= step_bytes or (step.tiles == 1 and step.tile <= 16)
    distance = np.arange(offset, keys)[:, None] - np.arange(keys)[None]
    visible = (distance >= 0) & (distance < (window or keys))
    assert covered.max() <= 1 and (covered[visible] == 1).all()
    if window is not None and step_bytes == 1:
        assert covered.sum() <= queries * (window + 2 * 16)


def peak(function, length, **shape):
    *arguments, cotangent = tensors(length=length, **shape)
    mx.eval(arguments, cotangent)
    step = lambda: mx.eval(mx.vjp(function, arguments, [cotangent]))
    step()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step()
    return mx.get_peak_memory() - before


def test_memory_grows_with_length_only():
    """Twice the length at most 2.2 times the memory, as one lazy graph; with an array mask it is 3.5 times or more."""
    window = lambda *x: blockwise.attention(*x, scale=SCALE, window=64, step_bytes=1 << 17)
    causal = lambda *x: blockwise.attention(*x, scale=SCALE, step_bytes=1 << 17)
    array = lambda *x: mx.fast.scaled_dot_product_attention(
        *x, scale=SCALE, mask=Mask(x[0].shape[2], window=64).plain()
    )
    for form in (window, causal):
        assert peak(form, 2048) < 2.2 * peak(form, 1024)
    assert peak(array, 1024) > 3.5 * peak(array, 512)
    assert peak(window, 1024) < 0.1 * peak(array, 1024)


# ------------------------------------------------------------------------------------------------------------- choice
def test_what_auto_takes(monkeypatch):
    def chosen(device, length, d=128, dtype=mx.bfloat16, wanted="auto", **mask):
        monkeypatch.setattr(backend, "device", lambda: device)
        queries = SimpleNamespace(shape=(1, 12, length, d), dtype=dtype)
        keys = SimpleNamespace(shape=(1, 2, length, d), dtype=dtype)
        return attend.choose(wanted, Mask(length, **mask), queries, keys, keys)

    starts = mx.zeros((1, 1), mx.int32)
    for device in ("cuda", "metal", "cpu"):
        assert chosen(device, 64) == chosen(device, 64, window=16) == "fused"
        assert chosen(device, 8192, window=512) == chosen(device, 8192, starts=starts) == "blockwise"
        assert chosen(device, 8192, window=512, wanted="fused") == "fused"
        assert chosen(device, 64, wanted="blockwise") == "blockwise"
    for device in ("cuda", "metal"):
        assert chosen(device, 8192) == chosen(device, 8192, window=8192) == "fused"
    assert chosen("cpu", 8192) == "blockwise"
    # where the kernels have no backward pass
    assert chosen("cuda", 8192, dtype=mx.float32) == chosen("cuda", 8192, d=256) == "blockwise"
    assert chosen("cuda", 8192 + 64) == "blockwise"
    assert chosen("metal", 8192, d=512) == "blockwise" and chosen("metal", 8192, d=256) == "fused"
    monkeypatch.setattr(attend, "_mlx", lambda: (0, 32, 3))
    assert chosen("metal", 8192) == "blockwise"


def test_masks_as_mlx_takes_them():
    assert Mask(5).plain() == Mask(5, window=5).plain() == "causal" and Mask(1, 7).plain() is None
    assert Mask(3, 2, window=2).plain().tolist() == [[j in (i + 1, i + 2) for j in range(5)] for i in range(3)]
    starts = mx.array(documents(2, 6, 3, 2)[0])
    expected = lambda start, i: [start <= j <= i for j in range(6)]
    mask = Mask(6, starts=starts).plain()
    assert mask.shape == (2, 1, 6, 6)
    assert mask[0, 0].tolist() == [expected(s, i) for i, s in enumerate([0, 0, 0, 3, 3, 5])]
    assert mask[1, 0].tolist() == [expected(s, i) for i, s in enumerate([0, 0, 2, 2, 4, 5])]
    assert str(Mask(9, window=4, starts=starts)) == "window 4 and documents" and str(Mask(9, window=9)) == "causal"


# -------------------------------------------------------------------------------------------------------------- models
def tiny(source, family):
    loaded = load(source.folder(), family, dtype="float32")
    lora = apply_lora(loaded.model, [b.path for b in loaded.adapter.blocks()], LoraConfig(rank=4, scale=2.0), seed=0)
    randomize(lora)
    return loaded.adapter, lora


@pytest.mark.parametrize("source, family", [(TinyLlama(), Llama), (TinyGemma4(), Gemma4)], ids=["llama", "gemma4"])
def test_models_have_the_same_gradient(source, family, monkeypatch):
    """Windows, shared prompts, donors of keys and values; tiles of 16 queries."""
    adapter, lora = tiny(source, family)
    batch = random_examples(Orpo(), VOCABULARY, rows=2)
    reference = reference_step(adapter, lora, Orpo(), batch)
    monkeypatch.setitem(blockwise.STEP_BYTES, "cpu", 1)
    cells = itertools.product([Separate(), PrefixShared(), Packed()], [Plain(), Checkpoint("half"), Segmented(2)])
    for layout, backward in cells:
        found = parity(adapter, lora, Orpo(), Fused(7), backward, layout, batch, reference, "blockwise")
        assert max(found) < TOLERANCE, (layout, backward, found)
    # a window that is one token too long is noticed
    attention = blockwise.attention
    longer = lambda *x, window, **options: attention(*x, window=window and window + 1, **options)
    monkeypatch.setattr(blockwise, "attention", longer)
    found = parity(adapter, lora, Orpo(), Fused(7), Plain(), Separate(), batch, reference, "blockwise")
    assert found[1] > 100 * TOLERANCE


def test_attention_is_described_and_leads_to_mlx_lm_again():
    adapter, lora = tiny(TinyLlama(), Llama)
    batch = random_examples(Sft(), VOCABULARY, rows=2)
    describe = lambda form: StepEngine(adapter, lora, Sft(), Fused(7), Plain(), Separate(), form).describe_attention(
        batch
    )
    assert describe("blockwise") == "2 x blockwise (window 12), 3 x blockwise (causal)"
    assert describe("auto") == "2 x fused (window 12), 3 x fused (causal)"
    assert describe("fused") == "fused"
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_the_name_is_bound_during_the_call_only():
    adapter, _ = tiny(TinyLlama(), Llama)
    block, router = adapter.blocks()[0], Router("blockwise")
    attention = StreamAttention(4)
    bound, others = threading.Event(), []

    def other_thread():
        """Another model runs meanwhile, with masks as MLX takes them."""
        bound.wait()
        *arguments, _ = tensors(length=4)
        others.append(llama.scaled_dot_product_attention(*arguments, None, SCALE, "causal").tolist())

    thread = threading.Thread(target=other_thread)
    thread.start()

    def call():
        assert llama.scaled_dot_product_attention == router._attend
        bound.set()
        thread.join()
        raise KeyError("from the block")

    with pytest.raises(KeyError, match="from the block"):
        router.run(adapter, block, attention, call)
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert mx.allclose(mx.array(others[0]), plain(*tensors(length=4)[:3]), atol=1e-6)


class OwnAttention(nn.Module):
    """Computes its softmax itself."""

    def __call__(self, scores, mask):
        return mx.softmax(mx.where(mask, scores, -1e9), axis=-1)


def test_layers_that_compute_attention_themselves():
    """auto gives them plain masks; blockwise refuses, whether or not their file knows mlx-lm's attention."""
    layer, scores = OwnAttention(), mx.zeros((4, 4))
    block = Block(3, "model.layers.3", layer)
    attention = lambda: StreamAttention(4)
    ours = SimpleNamespace()  # in no module that knows the name
    for scaled in (False, True):
        if scaled:  # as in files whose other layers use it
            globals()["scaled_dot_product_attention"] = base.scaled_dot_product_attention
        try:
            a = attention()
            result = Router("auto").run(ours, block, a, lambda: layer(scores, a.mask(window=2)))
            assert mx.allclose(result, mx.array(np.tril(np.triu(np.ones((4, 4)), -1)) / [[1], [2], [2], [2]]))
            b = attention()
            with pytest.raises(CompatError, match=r"layer 3 \(model.layers.3\).* use attention=fused"):
                Router("blockwise").run(ours, block, b, lambda: layer(scores, b.mask(window=2)))
            c = attention()  # a layer without attention
            assert Router("blockwise").run(ours, block, c, lambda: 5) == 5
        finally:
            globals().pop("scaled_dot_product_attention", None)


def test_families_with_attention_of_their_own_are_refused_before_weights():
    configs = {kind: {"model_type": kind} for kind in ("llama", "qwen3", "gemma2", "gemma4")}
    refused = [kind for kind, config in configs.items() if list(attend.problems("blockwise", config))]
    assert refused == ["gemma2"] and "scaled_dot_product_attention" not in vars(gemma2)
    assert not list(attend.problems("auto", configs["gemma2"]))
    setup = Setup(Sft(), Fused(), Plain(), Separate(), LoraConfig(), 2, "cpu", attention="blockwise")
    with pytest.raises(
        CompatError, match="attention=blockwise cannot be used with model_type 'gemma2'.*attention=fused"
    ):
        compat.check(setup, Llama, configs["gemma2"])


def test_packing_is_refused_where_it_cannot_be():
    class Hybrid(Llama):
        features = frozenset({"half_blocks"})

    setup = lambda rows: Setup(Sft(), Fused(), Plain(), Packed(), LoraConfig(), rows, "cpu")
    with pytest.raises(CompatError, match="needs the model feature packing, which family Hybrid lacks"):
        compat.check(setup(2), Hybrid, {"model_type": "llama"})
    with pytest.raises(CompatError, match="train.batch_size=1"):
        compat.check(setup(1))
    compat.check(setup(2), Llama, {"model_type": "llama"})

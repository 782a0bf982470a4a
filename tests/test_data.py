"""From files to examples: what is read, which tokens result, what is cut or refused, and in which order rows come."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import transformers

from mlxlab.data import Batches, DataConfig, load_examples
from mlxlab.data.batches import length
from mlxlab.data.encode import Encoder
from mlxlab.data.records import to_record
from mlxlab.data.truncate import truncate
from mlxlab.errors import ConfigError, DataError
from mlxlab.interfaces import Example, Scores, TokenLogps, TokenSequence, Totals
from mlxlab.memory.layouts.separate import Separate
from mlxlab.methods.sft import Sft

HERE = Path(__file__).parent / "data"
CASES = HERE / "cases"


def tokenizer(name="chatml"):
    return transformers.AutoTokenizer.from_pretrained(HERE / "tokenizers" / name)


def load(case, kind="completion", template="auto", name="chatml", **options):
    return load_examples(DataConfig(str(CASES / case), template=template, **options), tokenizer(name), kind)


def expected(case):
    return json.loads((CASES / case / "expected.json").read_text(encoding="utf-8"))


def streams(dataset, branch="completion"):
    return [example.branches[branch].ids.tolist() for example in dataset.train]


def supervised(example, branch="completion"):
    sequence = example.branches[branch]
    return sequence.ids[sequence.response].tolist()


def sequence(total, prompt):
    return TokenSequence(np.arange(total, dtype=np.int32), np.arange(total) >= prompt)


# ------------------------------------------------------------------------------------------------------------ reading
def test_a_byte_order_mark_is_not_data(tmp_path):
    with_mark = load("01-bom")
    (tmp_path / "train.jsonl").write_bytes((CASES / "01-bom" / "train_nobom.jsonl").read_bytes())
    without = load_examples(DataConfig(str(tmp_path)), tokenizer(), "completion")
    assert (CASES / "01-bom" / "train.jsonl").read_bytes().startswith(b"\xef\xbb\xbf")
    assert streams(with_mark) == streams(without) and len(with_mark.train) == 2 and with_mark.valid


def test_carriage_returns_and_blank_lines():
    dataset = load("03-crlf-blank-corrupt/ok")
    assert [example.source for example in dataset.train] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]
    assert not any("\r" in tokenizer().decode(ids) for ids in streams(dataset))


def test_a_corrupt_line_is_named():
    with pytest.raises(DataError, match=r"train\.jsonl, line 3: not valid JSON"):
        load("03-crlf-blank-corrupt/corrupt")


def test_the_locale_has_no_say():
    code = (
        "import json, sys, transformers\n"
        "from mlxlab.data import DataConfig, load_examples\n"
        "tok = transformers.AutoTokenizer.from_pretrained(sys.argv[2])\n"
        "data = load_examples(DataConfig(sys.argv[1], template='raw'), tok, 'completion')\n"
        "print(json.dumps([e.branches['completion'].ids.tolist() for e in data.train]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(CASES / "05-locale"), str(HERE / "tokenizers" / "chatml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == streams(load("05-locale", template="raw"))


def test_all_bad_rows_are_named_before_training():
    with pytest.raises(DataError) as error:
        load("07-missing-key-later")
    text = str(error.value)
    assert "train.jsonl:3: the key 'completion' is missing" in text
    assert "train.jsonl:4" in text and "is 'completions' meant to be 'completion'?" in text


@pytest.mark.parametrize(
    "case, kind", [("09-empty-response/sft", "completion"), ("09-empty-response/pref", "preference")]
)
def test_an_empty_response_is_refused(case, kind):
    with pytest.raises(DataError, match=r"train\.jsonl:2: the (completion|rejected) response is empty"):
        load(case, kind)


@pytest.mark.parametrize(
    "row, kind, sentence",
    [
        ([1], "completion", "must be a JSON object, got list"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "preference", "identical, so there is nothing to prefer"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "completion", "this is a preference row; sft needs"),
        ({"prompt": "a", "completion": "b"}, "preference", "a preference row needs prompt"),
        ({"prompt": "a", "completion": 3}, "completion", "completion must be a string or a list of messages, got int"),
        ({"messages": []}, "completion", "must be a non-empty list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "completion", "must end with an assistant turn"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "completion", "did you mean 'user'"),
        ({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]},
         "preference", "must begin with the same messages"),
        ({"txt": "a"}, "completion", "is 'txt' meant to be 'text'"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(row, kind, sentence):
    with pytest.raises(DataError, match="x:1") as error:
        to_record(row, kind, "x:1")
    assert sentence in str(error.value)


def test_one_enormous_row(tmp_path):
    rows = [{"prompt": "hi", "completion": "yes"}, {"text": "yes " * 1_000_000}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dataset = load_examples(DataConfig(str(tmp_path), max_tokens=64), tokenizer(), "completion")
    assert [len(example.branches["completion"]) for example in dataset.train][1] == 64
    assert any("train.jsonl:2" in sentence for sentence in dataset.report)


def test_paths(tmp_path):
    with pytest.raises(DataError, match="neither a folder nor a file"):
        load_examples(DataConfig(str(tmp_path / "none")), tokenizer(), "completion")
    with pytest.raises(DataError, match="has no train.jsonl"):
        load_examples(DataConfig(str(tmp_path)), tokenizer(), "completion")
    with pytest.raises(DataError, match="did you mean 'everyday'"):
        load_examples(DataConfig("mlxlab://everday"), tokenizer(), "completion")
    for kind in ("completion", "preference"):
        assert load_examples(DataConfig("mlxlab://shouting"), tokenizer(), kind).valid


# ------------------------------------------------------------------------------------------------------ token streams
def test_tool_arguments_as_object_and_as_string_are_the_same():
    first, second = streams(load("12-tool-arguments-string"))
    assert first == second
    assert tokenizer().decode(first) == expected("12-tool-arguments-string")["both_rows_render"]


def test_a_template_that_refuses_a_row_is_quoted():
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*this template has no system role"):
        load("13-system-refused", name="no_system")


def test_raw_rows_keep_their_joint_encoding():
    dataset, want = load("19-boundary-merge", template="raw"), expected("19-boundary-merge")
    eos = tokenizer().eos_token_id
    assert streams(dataset) == [[*ids, eos] for ids in want["joint_ids"]]
    lines = (CASES / "19-boundary-merge" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for example, row in zip(dataset.train, map(json.loads, lines)):
        ids, learned = example.branches["completion"].ids[:-1], supervised(example)[:-1]
        assert tokenizer().decode(ids) == row["prompt"] + row["completion"]
        assert learned and row["completion"].strip() in tokenizer().decode(learned)
        before = tokenizer().decode(ids[: len(ids) - len(learned)])
        assert row["prompt"].startswith(before)  # everything that is not learned is prompt only


def test_one_beginning_of_sequence():
    want = expected("20-double-bos")
    assert streams(load("20-double-bos", name="chatml_bos")) == [want["ids"]]
    row = json.loads((CASES / "20-double-bos" / "pref.jsonl").read_text(encoding="utf-8"))
    example = Encoder.of(tokenizer("chatml_bos"), "auto")(to_record(row, "preference", "pref.jsonl:1"))
    for branch in example.branches.values():
        assert branch.ids.tolist().count(want["bos_id"]) == 1 and branch.ids[0] == want["bos_id"]
    encoder = Encoder.of(tokenizer("chatml_bos"), "raw")
    texts = [{"text": "hi"}, {"text": "<bos>hi"}]
    for row in (*texts, {"prompt": "hi", "completion": "yes"}, {"prompt": "", "completion": "a"}):
        ids = encoder(to_record(row, "completion", "x:1")).branches["completion"].ids.tolist()
        assert ids.count(want["bos_id"]) == 1 and ids[0] == want["bos_id"]
    pair = encoder(to_record({"prompt": "un", "chosen": "happy", "rejected": "no"}, "preference", "x:1"))
    assert [branch.ids.tolist().count(want["bos_id"]) for branch in pair.branches.values()] == [1, 1]


def test_the_response_ends_with_its_turn_and_opens_no_other():
    dataset, want = load("25-header-after-response", "preference"), expected("25-header-after-response")
    for branch in ("chosen", "rejected"):
        assert streams(dataset, branch) == [want[branch]]
        assert tokenizer().decode(supervised(dataset.train[0], branch)).rstrip("\n").endswith("<|im_end|>")


def test_a_template_that_opens_a_block_for_generation():
    """The prompt ends where the finished turn and the generation prompt part; no response character is lost."""
    encoder = Encoder.of(tokenizer("think_strip"), "auto")
    example = encoder(to_record({"prompt": "hi", "completion": "yes"}, "completion", "x:1"))
    assert "yes" in tokenizer("think_strip").decode(supervised(example))


def test_preference_forms_agree():
    user, yes, no = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yes"), ("assistant", "no")))
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": [user], "chosen": "yes", "rejected": "no"},
        {"prompt": [user], "chosen": [yes], "rejected": [no]},
        {"chosen": [user, yes], "rejected": [user, no]},
    ]
    encoder = Encoder.of(tokenizer(), "auto")
    examples = [encoder(to_record(row, "preference", "x:1")) for row in rows]
    for branch in ("chosen", "rejected"):
        assert len({tuple(e.branches[branch].ids.tolist()) for e in examples}) == 1
        assert len({e.branches[branch].supervised for e in examples}) == 1


def test_chat_template_is_required_when_asked_for():
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; use data.template=raw"):
        Encoder.of(plain, "chat")


# ---------------------------------------------------------------------------------------------------------- truncation
def test_the_end_is_kept_before_any_padding():
    example = Example({"c": TokenSequence(np.arange(1, 7, dtype=np.int32), np.arange(6) >= 4)})
    kept = truncate(example, 5, "keep_end").branches["c"]
    assert (kept.ids.tolist(), kept.response.tolist()) == ([2, 3, 4, 5, 6], [False, False, False, True, True])


def test_long_responses_keep_their_end_before_any_padding():
    case = json.loads((CASES / "24-keep-end-after-padding" / "input.json").read_text(encoding="utf-8"))
    want = expected("24-keep-end-after-padding")
    for row, ids, mask in zip(case["rows"], want["ids"], want["response_mask"], strict=True):
        tokens = np.array(row["prompt"] + row["response"], np.int32)
        example = Example({"c": TokenSequence(tokens, np.arange(len(tokens)) >= len(row["prompt"]))})
        kept = truncate(example, case["max_length"], "keep_end").branches["c"]
        assert (kept.ids.tolist(), kept.response.astype(int).tolist()) == (ids, mask)


def test_padding_is_no_target():
    case = json.loads((CASES / "17-pad-off-by-one" / "input.json").read_text(encoding="utf-8"))
    want = expected("17-pad-off-by-one")
    sequences = [
        TokenSequence(np.array(ids, np.int32), np.arange(len(ids)) >= prompt)
        for ids, prompt in zip(case["rows"], case["prompt_lengths"], strict=True)
    ]
    # a third row without a target makes the padding
    longest = TokenSequence(np.zeros(case["pad_to"] + 1, np.int32), np.zeros(case["pad_to"] + 1, bool))
    batch, method = [Example({"completion": s}) for s in (*sequences, longest)], Sft()
    plan = Separate().plan(batch, method.spans())
    (stream,), (span,) = plan.streams.values(), plan.spans
    assert stream.ids.shape == (3, case["pad_to"])
    for row in (0, 1):
        of_row = span.row == row
        # position t predicts token t + 1
        assert (span.index[of_row] - row * case["pad_to"]).tolist() == want["supervised_target_index_per_row"]
        assert span.target[of_row].tolist() == want["supervised_token_ids"]
    totals = Totals.of(batch, method.spans())
    assert totals.tokens == {("completion", "response"): want["ntoks"]} and len(span.target) == want["ntoks"]
    logps = mx.full(len(span.target), -math.log(case["vocab"]))
    scores = Scores({("completion", "response"): TokenLogps(logps, mx.array(span.row), 3)}, totals)
    assert method.loss(scores, None)[0].item() == pytest.approx(want["loss"], abs=1e-6)


def test_the_shared_prompt_is_cut_once_by_the_longer_response():
    example = Example({"chosen": sequence(14, 9), "rejected": sequence(11, 9)})
    cut = truncate(example, 12, "keep_end")
    assert cut.branches["chosen"].ids.tolist() == list(range(2, 14))
    assert cut.branches["rejected"].ids.tolist() == list(range(2, 11))
    assert [branch.supervised for branch in cut.branches.values()] == [5, 2]
    kept = truncate(example, 12, "keep_end", bos=0)
    assert kept.branches["chosen"].ids.tolist() == [0, *range(3, 14)]


def test_what_is_left_of_a_pair_can_be_compared():
    # keep_end: a pair whose longer response fills the window shares no prompt any more
    assert truncate(Example({"chosen": sequence(14, 4), "rejected": sequence(11, 4)}), 9, "keep_end") is None
    # keep_start: responses that differ only beyond the cut are the same
    same = Example({"chosen": sequence(14, 4), "rejected": sequence(15, 4)})
    assert truncate(same, 14, "keep_start") is None and truncate(same, 15, "keep_start") is same
    both = Example({"chosen": sequence(14, 4), "rejected": TokenSequence(np.arange(9, -1, -1), np.arange(10) >= 4)})
    kept = truncate(both, 9, "keep_start")
    assert [len(branch) for branch in kept.branches.values()] == [9, 9]
    assert [branch.supervised for branch in kept.branches.values()] == [5, 5]


def test_no_policy_leaves_a_row_without_a_target():
    for prompt in (8, 9, 20):
        example = Example({"c": sequence(30, prompt)})
        assert truncate(example, 8, "keep_end") is None and truncate(example, 8, "keep_start") is None
    assert truncate(Example({"c": sequence(30, 7)}), 8, "keep_start").branches["c"].supervised == 1
    assert truncate(Example({"c": sequence(30, 7)}), 8, "keep_end").branches["c"].supervised == 7


def test_long_rows_can_be_refused():
    with pytest.raises(DataError, match=r"train.jsonl:\d: longer than data.max_tokens=100; raise it, or choose"):
        load("53-length-sorting", template="raw", max_tokens=100, truncate="error")
    assert len(load("53-length-sorting", template="raw", truncate="error").train) == 8


def test_a_prompt_that_fills_the_window():
    dataset = load("22-prompt-fills-window", "preference", max_tokens=16)
    assert [example.source for example in dataset.train] == ["train.jsonl:2"]
    whole = load("22-prompt-fills-window", "preference").train
    for branch, left in dataset.train[0].branches.items():  # the loss is that of row 2 alone
        assert left.ids.tolist() == whole[1].branches[branch].ids.tolist()
    assert "1 of 2 rows left out: too long for data.max_tokens=16 (train.jsonl:1)" in dataset.report
    with pytest.raises(DataError, match="no usable row"):
        load("22-prompt-fills-window/all_bad", "preference", max_tokens=16)


def test_drop_leaves_long_rows_out():
    dataset = load("53-length-sorting", template="raw", max_tokens=100, truncate="drop")
    assert len(dataset.train) == 4 and "4 of 8 rows left out" in dataset.report[0]
    assert len(load("53-length-sorting", template="raw", max_tokens=100).train) == 8


# ------------------------------------------------------------------------------------------------------------- batches
def test_every_row_once_per_epoch():
    dataset = load("32-remainder-rows", template="raw")
    batches = Batches(dataset.train, 4, seed=3)
    assert batches.batches_per_epoch == 3
    for _ in range(2):
        epoch = batches.take(3)
        assert sorted(map(len, epoch)) == [2, 4, 4]
        assert sorted(e.source for batch in epoch for e in batch) == sorted(e.source for e in dataset.train)


def test_similar_lengths_share_a_batch():
    dataset, want = load("53-length-sorting", template="raw"), expected("53-length-sorting")
    assert sorted(map(length, dataset.train)) == sorted(want["tokens_with_eos"])
    epoch = list(Batches(dataset.train, 2, seed=0).epoch())
    assert sum(len(batch) * max(map(length, batch)) for batch in epoch) == want["padded_tokens_sorted"]


def test_order_is_a_function_of_the_seed():
    examples = [Example({"c": sequence(5 + i % 3, 2)}, str(i)) for i in range(20)]
    order = lambda seed, start=None: [
        e.source for batch in _started(Batches(examples, 3, seed), start).take(20) for e in batch
    ]
    assert order(0) == order(0) != order(1)
    assert order(0)[:20] != order(0)[20:40]
    batches = Batches(examples, 3, 0)
    batches.take(9)
    position = dict(batches.position)
    rest = [e.source for batch in batches.take(5) for e in batch]
    assert rest == order(0, position)[: len(rest)]


def _started(batches, position):
    if position:
        batches.position = dict(position)
    return batches


@pytest.mark.parametrize("options, sentence", [
    ({"max_tokens": 1}, "max_tokens must be >= 2, got 1"),
    ({"truncate": "keep"}, "did you mean 'keep_end'"),
    ({"template": "chatt"}, "did you mean 'chat'"),
])  # fmt: skip
def test_ranges(options, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        DataConfig("x", **options)

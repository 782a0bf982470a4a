"""Where rows go wrong without a word: seams between prompt and response, odd rows, very large rows, remainders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from mlxlab.data import Batches, DataConfig, load_examples
from mlxlab.data.batches import padded_tokens
from mlxlab.errors import DataError
from mlxlab.interfaces import Example, TokenSequence

TOKENIZERS = Path(__file__).parent / "data" / "tokenizers"


def tokenizer(name="chatml", template=None):
    result = transformers.AutoTokenizer.from_pretrained(TOKENIZERS / name)
    result.chat_template = template or result.chat_template
    return result


@pytest.fixture
def load(tmp_path):
    """Writes rows (or bytes) and loads them."""

    def load(rows, kind, tok=None, **options):
        content = rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode()
        (tmp_path / "train.jsonl").write_bytes(content)
        return load_examples(DataConfig(str(tmp_path), **options), tok or tokenizer(), kind)

    return load


def parts(example, branch, tok):
    sequence = example.branches[branch]
    return tok.decode(sequence.ids[~sequence.response]), tok.decode(sequence.ids[sequence.response])


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


# -------------------------------------------------------------------------------------------------------------- seams
def test_both_branches_of_a_raw_pair_continue_the_same_tokens(load):
    """ "un" + "happy" is one token when it is encoded together; "un" + " no" is two."""
    example = load([{"prompt": "un", "chosen": "happy", "rejected": " no"}], "preference", template="raw").train[0]
    assert parts(example, "chosen", tokenizer()) == ("un", "happy<eos>")
    assert parts(example, "rejected", tokenizer()) == ("un", " no<eos>")


def test_a_response_that_begins_like_a_think_block_stays_whole(load):
    tok = tokenizer("think_strip")
    example = load([{"prompt": "hi", "chosen": "<b>yes", "rejected": "no"}], "preference", tok).train[0]
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert parts(example, "chosen", tok) == (prompt, "<b>yes<|im_end|>\n")
    assert parts(example, "rejected", tok) == (prompt, "no<|im_end|>\n")


def test_a_template_that_rewrites_the_prompt_is_refused(load):
    rewrites = (
        "{% for m in messages %}{% if loop.last and m['role'] == 'user' %}NEW {% endif %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match=r"train\.jsonl:1: the chat template writes the turns before the answer"):
        load([{"prompt": "hi", "completion": "yes"}], "completion", tokenizer(template=rewrites))


def test_end_of_sequence_is_not_doubled(load):
    example = load([{"prompt": "hi", "completion": " yes<eos>"}], "completion", template="raw").train[0]
    assert parts(example, "completion", tokenizer()) == ("hi", " yes<eos>")


# ------------------------------------------------------------------------------------------------------------ formats
def test_conversations_may_repeat_the_prompt(load):
    chosen, rejected = [user("hi"), assistant("yes")], [user("hi"), assistant("no")]
    rows = [
        {"prompt": "hi", "chosen": chosen, "rejected": rejected},
        {"prompt": [user("hi")], "chosen": chosen, "rejected": rejected},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    ]
    streams = [[b.ids.tolist() for b in e.branches.values()] for e in load(rows, "preference").train]
    assert streams[0] == streams[1] == streams[2]


def test_parts_of_a_text_are_joined(load):
    part = lambda text: [{"type": "text", "text": text}]
    rows = [{"messages": [user(part("hi")), assistant(part("yes"))]}, {"messages": [user("hi"), assistant("yes")]}]
    first, second = load(rows, "completion").train
    assert first.branches["completion"].ids.tolist() == second.branches["completion"].ids.tolist()


@pytest.mark.parametrize(
    "row, kind, sentence",
    [
        (
            {
                "chosen": [user("hi"), assistant("a"), user("b"), assistant("c")],
                "rejected": [user("hi"), assistant("d"), user("e"), assistant("f")],
            },
            "preference",
            "chosen must add one assistant turn to the prompt, got assistant, user, assistant",
        ),
        (
            {"prompt": [user("hi")], "chosen": [user("a")], "rejected": [user("b")]},
            "preference",
            "chosen must add one assistant turn to the prompt, got user",
        ),
        (
            {"messages": [user("hi"), {"role": "assistant", "tool_calls": {"a": 1}}]},
            "completion",
            "tool_calls must be a list of objects",
        ),
        (
            {"messages": [user([{"type": "image"}]), assistant("a")]},
            "completion",
            "content must be a string or parts with text",
        ),
    ],
)
def test_rows_that_would_teach_something_else(load, row, kind, sentence):
    with pytest.raises(DataError, match="train.jsonl:1") as error:
        load([row], kind)
    assert sentence in str(error.value)


def test_messages_need_a_template(load):
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(DataError, match=r"train\.jsonl:1: messages need a chat template"):
        load([{"messages": [user("hi"), assistant("yes")]}], "completion", plain)


def test_lines_that_cannot_be_read_are_collected_with_the_others(load):
    lines = b'{"prompt": "a", "co\n{"prompt": "hi"}\n{"prompt": "hi", "completion": "\\ud83d"}\n'
    with pytest.raises(DataError) as error:
        load(lines, "completion")
    text = str(error.value)
    assert "line 1: not valid JSON" in text and "train.jsonl:2: the key 'completion'" in text and "line 3: not" in text


# --------------------------------------------------------------------------------------------------------------- size
def test_rows_without_a_prompt_are_cut_by_the_policy(load):
    rows = [{"prompt": "", "completion": "yes" + " yes" * 30}, {"text": "yes" + " yes" * 30}]
    for policy, last in (("keep_end", "<eos>"), ("keep_start", " yes")):
        dataset = load(rows, "completion", template="raw", max_tokens=8, truncate=policy)
        assert [(e.source[-1], len(e.branches["completion"])) for e in dataset.train] == [("1", 8), ("2", 8)]
        assert {tokenizer().decode(e.branches["completion"].ids[-1:]) for e in dataset.train} == {last}
        assert "2 of 2 rows lost tokens that were to be learned (train.jsonl:1, train.jsonl:2)" in dataset.report


@pytest.mark.parametrize("template", ["raw", "chat"])
def test_memory_of_an_enormous_row_stays_in_proportion(tmp_path, template):
    """A row of 12 MiB may cost five times its size; with all its tokens it would be more than a hundred times."""
    big = "the sky is blue and " * 630_000
    rows = [{"prompt": "hi", "completion": " hello"}, {"prompt": "Question", "completion": " " + big}, {"text": big}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    code = (
        "import resource, sys, transformers\n"
        "from mlxlab.data import DataConfig, load_examples\n"
        "tok = transformers.AutoTokenizer.from_pretrained(sys.argv[2]); tok('hi')\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit\n"
        "before = peak()\n"
        "data = load_examples(DataConfig(sys.argv[1], template=sys.argv[3]), tok, 'completion')\n"
        "print([e.source for e in data.train], len(data.train[1].branches['completion']))\n"
        "print(data.report)\n"
        "print(peak() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(TOKENIZERS / "chatml"), template]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, report, rise = done.stdout.splitlines()[-3:]
    assert kept == "['train.jsonl:1', 'train.jsonl:2', 'train.jsonl:3'] 2048"
    assert "2 of 3 rows cut" in report and "train.jsonl:2, train.jsonl:3" in report
    assert int(rise) < 5 * 12.6e6


# ------------------------------------------------------------------------------------------------------------ batches
def rows(count):
    return [Example({"c": TokenSequence(np.arange(n), np.ones(n, bool))}, str(n)) for n in range(2, 2 + count)]


def test_the_smaller_batch_has_other_rows_in_other_epochs():
    batches = Batches(rows(10), 4, seed=0)
    smaller = {tuple(e.source for e in b) for epoch in range(8) for b in batches.epoch(epoch) if len(b) == 2}
    assert len(smaller) > 1


def test_padding_counts_each_branch_by_itself():
    sequence = lambda n: TokenSequence(np.arange(n), np.ones(n, bool))
    batch = [Example({"chosen": sequence(a), "rejected": sequence(b)}) for a, b in ((5, 2), (3, 4))]
    assert padded_tokens(batch) == 2 * 5 + 2 * 4


@pytest.mark.parametrize("position", [{"epoch": 0, "batch": 3}, {"epoch": -1, "batch": 0}, {"epoch": 0, "batch": -1}])
def test_a_position_of_other_rows_is_refused(position):
    batches = Batches(rows(10), 4, seed=0)
    with pytest.raises(ValueError, match="another batch size"):
        batches.position = position


def test_nothing_to_batch():
    with pytest.raises(ValueError, match="got 0 examples"):
        Batches([], 4, seed=0)

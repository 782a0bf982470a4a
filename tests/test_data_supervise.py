"""Which tokens of a conversation are learned, and streams that equal those of generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlxlab.data import DataConfig, load_examples
from mlxlab.data.encode import Encoder
from mlxlab.data.records import to_record
from mlxlab.errors import ConfigError, DataError

TOKENIZERS = Path(__file__).parent / "data" / "tokenizers"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "ok"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "the sky"},
    {"role": "assistant", "content": "blue"},
]


def tokenizer(name="chatml", template=None):
    result = transformers.AutoTokenizer.from_pretrained(TOKENIZERS / name)
    result.chat_template = template or result.chat_template
    return result


@pytest.fixture
def load(tmp_path):
    def load(rows, tok=None, kind="completion", **options):
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return load_examples(DataConfig(str(tmp_path), **options), tok or tokenizer(), kind)

    return load


def learned(example, tok, branch="completion"):
    """Texts of the spans that are learned."""
    sequence, runs, before = example.branches[branch], [], False
    for token, wanted in zip(sequence.ids.tolist(), sequence.response.tolist()):
        if wanted:
            runs[-1:] = [[*runs[-1], token]] if before else [*runs[-1:], [token]]
        before = wanted
    return [tok.decode(run) for run in runs]


def test_the_last_turn_or_all_of_them(load):
    assert learned(load([{"messages": TURNS}]).train[0], tokenizer()) == ["blue<|im_end|>\n"]
    both = load([{"messages": TURNS}], supervise="all").train[0]
    assert learned(both, tokenizer()) == ["hello<|im_end|>\n", "blue<|im_end|>\n"]
    assert (
        both.branches["completion"].ids.tolist()
        == load([{"messages": TURNS}]).train[0].branches["completion"].ids.tolist()
    )


def test_the_marks_of_the_template(load):
    tok = tokenizer(template=MARKED)
    example = load([{"messages": TURNS}], tok, supervise="template").train[0]
    assert learned(example, tok) == ["hello<|im_end|>", "blue<|im_end|>"]
    assert tok.decode(example.branches["completion"].ids) == tok.apply_chat_template(TURNS, tokenize=False)


def test_every_answer_is_what_generation_would_write(load):
    """A template that takes thinking out of earlier answers: no single text holds all answers as they are given."""
    thought = [*TURNS[:2], {"role": "assistant", "content": "<think>a</think>hello"}, *TURNS[3:]]
    tok = tokenizer("think_strip")
    dataset = load([{"messages": thought}, {"messages": TURNS}], tok, supervise="all")
    assert [e.source for e in dataset.train] == ["train.jsonl:1, answer 1", "train.jsonl:1, answer 2", "train.jsonl:2"]
    assert [learned(e, tok) for e in dataset.train][:2] == [["<think>a</think>hello<|im_end|>\n"], ["blue<|im_end|>\n"]]
    for count, example in zip((2, 4), dataset.train):
        prompt = tok.apply_chat_template(thought[:count], tokenize=False)
        assert tok.decode(example.branches["completion"].ids).startswith(prompt)
    assert any("1 of 2 rows became one example per answer" in line for line in dataset.report)


def test_an_answer_without_a_question(load):
    """The header of the turn is not learned: generation never writes it."""
    turns = [{"role": "assistant", "content": "hello"}]
    for supervise in ("last", "all"):
        assert learned(load([{"messages": turns}], supervise=supervise).train[0], tokenizer()) == ["hello<|im_end|>\n"]


def test_weights_of_turns(load):
    skipped = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
    assert learned(load([{"messages": skipped}], supervise="all").train[0], tokenizer()) == ["blue<|im_end|>\n"]
    with pytest.raises(DataError, match="train.jsonl:1: the last answer has weight 0"):
        load([{"messages": [*TURNS[:4], {**TURNS[4], "train": False}]}])
    with pytest.raises(DataError, match="an answer has weight 0, which needs data.supervise=all"):
        load([{"messages": skipped}], tokenizer(template=MARKED), supervise="template")


def test_what_cannot_be_supervised(load):
    with pytest.raises(ConfigError, match=r"has no {% generation %} marks; use data.supervise=last or all"):
        load([{"messages": TURNS}], supervise="template")
    with pytest.raises(ConfigError, match="data.supervise=all is for rows with one answer.*use data.supervise=last"):
        load([{"prompt": "a", "chosen": "b", "rejected": "c"}], kind="preference", supervise="all")
    with pytest.raises(ValueError, match="supervise='template' needs a chat template"):
        DataConfig("x", supervise="template", template="raw")
    with pytest.raises(ValueError, match="did you mean 'all'"):
        DataConfig("x", supervise="al")
    nothing = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'tool'")
    with pytest.raises(DataError, match="train.jsonl:1: the generation marks of the chat template cover no text"):
        load([{"messages": TURNS}], tokenizer(template=nothing), supervise="template")


def test_an_answer_ends_even_if_the_template_forgets_it(load):
    bare = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tok = tokenizer(template=bare)
    assert learned(load([{"messages": TURNS}], tok).train[0], tok) == ["blue\n<eos>"]


# -------------------------------------------------------------------------------- what templates drop without a word
@pytest.mark.parametrize(
    "template, row, sentence",
    [
        ("if m['role'] != 'system'", {"messages": TURNS}, "leaves out the system turn"),
        ("if true", {"messages": [*TURNS[:2], {"role": "assistant", "tool_calls": [{"name": "sun", "arguments": {}}]}]},
         "does not write tool calls (sun)"),
        ("if true", {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "sun"}}]},
         "does not show tools (sun)"),
        ("if true", {"messages": TURNS, "tools": '[{"name": "sun"}]'}, "does not show tools (sun)"),
    ],
)  # fmt: skip
def test_nothing_is_dropped_silently(load, template, row, sentence):
    text = (
        "{% for m in messages %}{% " + template + " %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match="train.jsonl:1: the chat template ") as error:
        load([row], tokenizer(template=text))
    assert sentence in str(error.value)


def test_branches_that_a_template_makes_equal(load):
    trims = tokenizer().chat_template.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    with pytest.raises(DataError, match="chosen and rejected give the same tokens"):
        load([{"prompt": "hi", "chosen": "yes", "rejected": "yes "}], tokenizer(template=trims), "preference")


# ---------------------------------------------------------------------------------- tokenizers that write a space first
def spaced(legacy):
    """A small tokenizer that puts a space before what it encodes: at the beginning, or after special tokens too."""
    letters = ["▁", *"abcdehinopsuy"]
    merges = [("u", "n"), ("▁", "un"), ("h", "a"), ("p", "p"), ("ha", "pp"), ("happ", "y")]
    merges += [("un", "happy"), ("▁un", "happy")]
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", *letters, *(a + b for a, b in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    if legacy:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tail = [decoders.Strip(" ", 1, 0)]
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_space_comes_between_prompt_and_response(legacy):
    """Encoded alone the response would begin with one."""
    tok = spaced(legacy)
    row = {"prompt": "un", "chosen": "happy", "rejected": "hide"}
    example = Encoder.of(tok, "raw")(to_record(row, "preference", "x:1"))
    for branch, text in (("chosen", "unhappy"), ("rejected", "unhide")):
        assert tok.decode(example.branches[branch].ids, skip_special_tokens=True) == text
        assert example.branches[branch].ids[:1].tolist() == tok("un", add_special_tokens=False)["input_ids"]


def test_thinking_is_that_of_mlx_lm(load):
    """Its wrapper tells the template whether to think, and generation is done through the wrapper."""
    template = tokenizer().chat_template.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}",
    )
    plain = tokenizer(template=template)
    wrapped = TokenizerWrapper(plain)
    assert wrapped.has_thinking and template != tokenizer().chat_template
    content = "<think>a</think>yes"
    example = load([{"prompt": "hi", "completion": content}], wrapped).train[0]
    prompt = wrapped.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert plain.decode(prompt).endswith("<think>")
    start = int(example.branches["completion"].response.argmax())
    assert example.branches["completion"].ids[:start].tolist() == prompt
    assert learned(example, plain) == ["a</think>yes<|im_end|>\n"]


@pytest.mark.parametrize("name", ["chatml", "chatml_bos", "no_system", "think_strip", "pad_is_eos"])
@pytest.mark.parametrize("content", ["\nyes", "\n\n yes", " yes", "yes", "happy"])
def test_the_prompt_has_the_tokens_of_generation(name, content):
    tok = tokenizer(name)
    example = Encoder.of(tok, "auto")(to_record({"prompt": "un", "completion": content}, "completion", "x:1"))
    sequence = example.branches["completion"]
    prompt = tok.apply_chat_template([{"role": "user", "content": "un"}], add_generation_prompt=True)["input_ids"]
    start = int(sequence.response.argmax())
    if name == "think_strip":  # generation begins a block that this answer does not have
        prompt = prompt[:start]
    assert sequence.ids[:start].tolist() == prompt[:start] and start == len(prompt)
    assert tok.decode(sequence.ids[start:]) == f"{content}<|im_end|>\n"
    assert sequence.ids.tolist().count(tok.bos_token_id) == (name == "chatml_bos")

"""The cache of tokens: never out of date, never half of it, never in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import transformers

from mlxlab.data import Batches, DataConfig, load_examples, tokenization
from mlxlab.data.encode import Encoder
from mlxlab.errors import DataError

TOKENIZERS = Path(__file__).parent / "data" / "tokenizers"


def tokenizer(name="chatml"):
    return transformers.AutoTokenizer.from_pretrained(TOKENIZERS / name)


def write(folder, rows=30, name="train.jsonl", extra=""):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"hi {i}", "completion": "yes " * (1 + i % 7) + extra}) for i in range(rows)]
    (folder / name).write_text("\n".join([*lines, '{"prompt": "a"}']), encoding="utf-8")
    return folder


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Everything is cached, in a folder of its own; `calls` counts texts that were tokenized."""
    monkeypatch.setenv("MLXLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenization, "CACHED_FROM", 0)
    calls, encode = [], Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: calls.append(len(texts)) or encode(self, texts))
    return calls


def load(folder, tok=None, **options):
    options = {"bad_rows": "skip", **options}
    return load_examples(DataConfig(str(folder), **options), tok or tokenizer(), "completion")


def same(first, second):
    assert len(first) == len(second) and first.lengths.tolist() == second.lengths.tolist()
    for a, b in zip(first, second):
        assert a.source == b.source and list(a.branches) == list(b.branches)
        for branch in a.branches:
            for field in ("ids", "response"):
                left, right = getattr(a.branches[branch], field), getattr(b.branches[branch], field)
                assert left.dtype == right.dtype and left.tolist() == right.tolist() and not left.flags.writeable
    return True


def entries(tmp_path):
    return sorted(path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())


def test_nothing_is_tokenized_twice(tmp_path, cached):
    folder = write(tmp_path / "data")
    first = load(folder)
    assert sum(cached) > 0
    cached.clear()
    again = load(folder)
    assert not cached and same(first.train, again.train) and first.report == again.report
    os.rename(folder, tmp_path / "elsewhere")
    assert same(load(tmp_path / "elsewhere").train, first.train) and not cached  # content counts, not place or time


def test_memory_and_cache_are_the_same(tmp_path, cached, monkeypatch):
    folder = write(tmp_path / "data")
    mapped, unmapped = load(folder, max_tokens=20), load(folder, max_tokens=20, cache=False)
    assert same(mapped.train, unmapped.train) and mapped.report == unmapped.report and len(entries(tmp_path)) == 1
    for dataset in (mapped, unmapped):
        with pytest.raises(DataError, match=r"train\.jsonl:31: the key 'completion' is missing"):
            load(folder, max_tokens=20, bad_rows="error", cache=dataset is mapped)
    monkeypatch.setattr(tokenization, "CACHED_FROM", 1 << 20)
    assert same(load(folder, max_tokens=20).train, mapped.train) and len(entries(tmp_path)) == 1


def test_the_parts_of_a_large_split_are_the_same_as_of_a_small_one(tmp_path, cached, monkeypatch):
    folder = write(tmp_path / "data")
    whole = load(folder, cache=False).train
    monkeypatch.setattr(tokenization, "_CHUNK_ROWS", 7)
    assert same(whole, load(folder, cache=False).train)
    monkeypatch.setattr(tokenization, "_CHUNK_CHARACTERS", 10)
    assert same(whole, load(folder, cache=False).train)


def test_whatever_tokens_depend_on_makes_them_again(tmp_path, cached, monkeypatch):
    folder = write(tmp_path / "data")
    load(folder)
    other_template = tokenizer()
    other_template.chat_template = other_template.chat_template.replace("im_end|>\n", "im_end|>")

    def edit_in_place():
        """Of equal size, with the old time of change."""
        path = folder / "train.jsonl"
        stat = path.stat()
        path.write_bytes(path.read_bytes().replace(b"hi 3", b"no 3"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    changes = {
        "max_tokens": lambda: load(folder, max_tokens=100),
        "truncate": lambda: load(folder, truncate="drop"),
        "template": lambda: load(folder, template="raw"),
        "supervise": lambda: load(folder, supervise="all"),
        "tokenizer": lambda: load(folder, tokenizer("chatml_bos")),
        "chat template": lambda: load(folder, other_template),
        "code": lambda: (monkeypatch.setattr(tokenization, "_code", lambda: "other"), load(folder)),
        "version": lambda: (monkeypatch.setattr(tokenization.metadata, "version", lambda name: "0"), load(folder)),
        "file": lambda: (edit_in_place(), load(folder)),
        "name": lambda: (os.rename(folder / "train.jsonl", folder / "train.ndjson"), load(folder)),
    }
    for number, (what, change) in enumerate(changes.items(), 2):
        cached.clear()
        change()
        assert cached and len(entries(tmp_path)) == number, what
    cached.clear()
    load(folder)
    assert not cached


@pytest.mark.parametrize("name", ["tokens.bin", "learned.bin", "offsets.bin", "places.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_noticed(tmp_path, cached, capsys, name, damage):
    folder = write(tmp_path / "data")
    first = load(folder)
    want = [e.branches["completion"].ids.tolist() for e in first.train]
    path = entries(tmp_path)[0] / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    cached.clear()
    again = load(folder)
    assert cached and "is damaged; making it again" in capsys.readouterr().out
    assert [e.branches["completion"].ids.tolist() for e in again.train] == want and first.report == again.report


def test_a_failure_leaves_nothing_behind(tmp_path, cached, monkeypatch):
    folder = write(tmp_path / "data")

    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Encoder, "finish", fail)
        load(folder)
    assert entries(tmp_path) == []
    assert load(folder).train


def test_a_file_that_changes_meanwhile(tmp_path, cached, monkeypatch):
    folder, finish = write(tmp_path / "data"), Encoder.finish
    monkeypatch.setattr(Encoder, "finish", lambda *args: write(folder, extra="no") and finish(*args))
    with pytest.raises(DataError, match="train.jsonl changed while it was read; start again"):
        load(folder)
    assert entries(tmp_path) == []


def test_a_cache_that_cannot_be_written(tmp_path, cached, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MLXLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="the token cache .* cannot be used .*or give data.cache=false"):
        load(write(tmp_path / "data"))


def test_two_runs_at_once(tmp_path):
    folder = write(tmp_path / "data", rows=2000)
    code = (
        "import sys, transformers\n"
        "from mlxlab.data import DataConfig, load_examples, tokenization\n"
        "from mlxlab.data.encode import Encoder\n"
        "tokenization.CACHED_FROM = 0\n"
        "encode, calls = Encoder.encode, []\n"
        "Encoder.encode = lambda self, texts: calls.append(1) or encode(self, texts)\n"
        "tok = transformers.AutoTokenizer.from_pretrained(sys.argv[2])\n"
        "data = load_examples(DataConfig(sys.argv[1], bad_rows='skip'), tok, 'completion')\n"
        "print(len(data.train), int(data.train.lengths.sum()), bool(calls))"
    )
    environment = {**os.environ, "MLXLAB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(folder), str(TOKENIZERS / "chatml")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].split()[-3:] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][:2] == outputs[1][:2] and outputs[0][0] == "2000"
    assert sorted(output[2] for output in outputs) == ["False", "True"]  # one of them made it, the other waited


def test_tokens_stay_on_disk(tmp_path, cached):
    """Twice the rows cost twice the index at most, not the tokens; a row costs its own tokens."""
    rises = []
    for rows in (1500, 3000):
        folder = tmp_path / f"data{rows}"
        folder.mkdir()
        line = json.dumps({"prompt": "hi", "completion": "the sky is blue " * 60})
        (folder / "train.jsonl").write_text(f"{line}\n" * rows, encoding="utf-8")
        tok = tokenizer()
        load(folder, tok)
        tracemalloc.start()
        dataset = load(folder, tok)
        assert len(dataset.train) == rows and dataset.train.lengths.sum() > 240 * rows
        rises.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert isinstance(dataset.train[0].branches["completion"].ids.base.base, np.memmap)
    assert rises[1] - rises[0] < 40 * 1500  # bytes; the tokens alone would be more than 1200 a row


def test_memory_of_building(tmp_path, cached, monkeypatch):
    """Rows pass through: what is in memory at once does not grow with the file."""
    monkeypatch.setattr(tokenization, "_CHUNK_ROWS", 64)
    peaks = []
    for rows in (150, 600):
        folder = tmp_path / f"data{rows}"
        folder.mkdir()
        line = json.dumps({"prompt": "hi", "completion": "the sky is blue " * 60})
        (folder / "train.jsonl").write_text(f"{line}\n" * rows, encoding="utf-8")
        tok = tokenizer()
        tracemalloc.start()
        load(folder, tok)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 200_000  # tokens and masks of 450 rows as arrays alone would be more


def test_examples_are_a_sequence(tmp_path, cached):
    train = load(write(tmp_path / "data")).train
    assert isinstance(train, Sequence) and train and len(train) == 30
    assert [e.source for e in train[4:7]] == ["train.jsonl:5", "train.jsonl:6", "train.jsonl:7"]
    assert train[-1].source == "train.jsonl:30" and train[4:7].lengths.tolist() == train.lengths[4:7].tolist()
    assert not train[30:] and train[30:].lengths.shape == (0,)
    with pytest.raises(IndexError):
        train[30]
    assert sorted(e.source for batch in Batches(train, 4, 0).take(8) for e in batch) == sorted(e.source for e in train)


def test_what_is_said_while_it_is_built(tmp_path, cached, capsys):
    folder = write(tmp_path / "data")
    load(folder)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("tokenizing train.jsonl") == 1
    load(folder)
    assert "tokenizing" not in capsys.readouterr().err


def test_a_bar_on_a_terminal(tmp_path, cached, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(tokenization, "_CHUNK_ROWS", 7)
    load(write(tmp_path / "data"))
    captured = capsys.readouterr()
    assert captured.out == "" and "tokenizing train.jsonl" in captured.err and "100%" in captured.err

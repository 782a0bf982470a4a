"""`mlxlab data`: what it says, as text and as HTML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlxlab.train
from mlxlab.data import DataConfig, load_examples
from mlxlab.models import load as loading
from mlxlab.models.tiny import TinyLlama

CASES = Path(__file__).parent / "data" / "cases"
ROWS = [
    {"prompt": "one <b>", "completion": "two & three"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "caf\u00e9\nau lait"}]},
    {"prompt": "x" * 100, "completion": "y"},
]


@pytest.fixture
def data(elsewhere, capsys, monkeypatch):
    """Runs the command in an empty folder, with a tiny tokenizer, where no weights can be loaded."""
    from mlxlab.cli import main

    def no_weights(*arguments, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load", no_weights)
    monkeypatch.setattr("mlx_lm.utils.load_model", no_weights)
    monkeypatch.setenv("NO_COLOR", "1")

    def data(*arguments):
        capsys.readouterr()
        code = main(["data", "model=tiny_llama", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return data


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_what_is_printed(data, elsewhere):
    write(elsewhere / "mine", ROWS)
    code, out, err = data("method=sft", "data=jsonl", "data.path=mine", "data.max_tokens=100", "rows=2")
    assert code == 0, err
    assert "mine: 3 rows, 2 examples; 0 cut, 1 left out, 0 refused; formats: 2 prompt + completion, 1 messages" in out
    assert "1 of 3 rows left out: too long for data.max_tokens=100 (train.jsonl:3)" in out
    assert "3 rows of 2 formats: 2 prompt + completion, 1 messages" in out
    for what in ("tokens per row (longest branch)", "learned tokens per row"):
        assert f"{what}, train: shortest" in out
    # learned tokens stand in brackets where there are no colours
    assert "<|start|>user↵\none <b><|end|>↵\n<|start|>assistant↵\n[[two & three<|end|>↵\n]]" in out
    assert "[[café↵\nau lait<|end|>↵\n]]" in out
    assert re.search(r"^train\.jsonl:1  completion: \d+ tokens, 13 learned$", out, re.M)


def test_colours(data, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    code, out, _ = data("method=sft", "data=shouting", "rows=1")
    assert code == 0 and "[[" not in out
    assert "\x1b[1;32mhot tea" in out and "\x1b[2m<|start|>user" in out


def test_rows_that_a_run_would_refuse(data, elsewhere):
    write(elsewhere / "mine", [*ROWS, {"prompt": "a"}, {"prompt": "b"}, {"txt": "c"}])
    code, out, _ = data("method=sft", "data=jsonl", "data.path=mine")
    assert code == 1 and "3 refused" in out
    assert "2 x the key 'completion' is missing (or null); keys of this row: prompt." in out
    assert "train.jsonl:6: a completion row needs" in out and "is 'txt' meant to be 'text'?" in out
    code, out, _ = data("method=sft", "data=jsonl", "data.path=mine", "data.bad_rows=skip")
    assert code == 0 and "3 of 6 rows left out: they cannot be used" in out


def test_a_run_names_bad_rows_before_it_loads_weights(data, elsewhere, monkeypatch, capsys):
    from mlxlab.cli import main

    monkeypatch.setattr(mlxlab.train, "load", loading.load)  # raises here
    code = main(
        ["model=tiny_llama", "method=sft", "data=jsonl", f"data.path={CASES / '03-crlf-blank-corrupt/corrupt'}"]
    )
    assert code == 1 and "train.jsonl, line 3: not valid JSON" in capsys.readouterr().err


def test_a_terminal_without_utf8(elsewhere):
    """Neither the command nor a run fails because its text cannot be printed; files are UTF-8 all the same."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    overrides = [
        "model=tiny_llama",
        "method=sft",
        "data=jsonl",
        f"data.path={CASES / '05-locale'}",
        "data.template=raw",
    ]
    for arguments in (["data", "output=out.html"], ["train.iters=1", "train.samples=1", "train.sample_tokens=1"]):
        command = [sys.executable, "-m", "mlxlab", *arguments, *overrides]
        done = subprocess.run(command, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr.decode()
        assert b"\\u201c" in done.stdout
    assert "<mark> 日本 😀" in (elsewhere / "out.html").read_text(encoding="utf-8")
    (metrics,) = elsewhere.glob("outputs/*/*/metrics.jsonl")
    assert "say “hi” café" in metrics.read_text(encoding="utf-8")


def test_html(data, elsewhere):
    write(elsewhere / "mine", [*ROWS, {"prompt": "a"}])
    code, out, _ = data("method=sft", "data=jsonl", "data.path=mine", "rows=9", "output=out.html")
    page = (elsewhere / "out.html").read_text(encoding="utf-8")
    assert code == 1 and f"written to {elsewhere / 'out.html'}" in out
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "<mark>two &amp; three&lt;|end|&gt;\n</mark>" in page and "one &lt;b&gt;" in page and "<b>" not in page
    assert "1 x the key &#x27;completion&#x27; is missing" in page and "<mark>café\nau lait" in page
    assert len(re.findall(r"<h3>train\.jsonl:\d</h3>", page)) == 3 and page.count('class="bar"') >= 2
    assert not re.search(r"(src|href)=", page)  # nothing comes from elsewhere
    assert sorted(path.name for path in elsewhere.iterdir()) == ["mine", "out.html"]
    code, _, err = data("data=shouting", "output=no/such/out.html")
    assert code == 1 and "output=no/such/out.html cannot be written" in err


def test_it_shows_what_a_run_uses(data, elsewhere):
    cases = [(["method=dpo"], "preference", "train"), (["method=sft", "split=valid"], "completion", "valid")]
    for arguments, kind, split in cases:
        _, out, _ = data("data=shouting", "rows=1", *arguments)
        tokenizer = loading.load_tokenizer(TinyLlama().folder())
        dataset = load_examples(DataConfig("mlxlab://shouting"), tokenizer, kind)
        example = (dataset.train if split == "train" else dataset.valid)[0]
        for branch, sequence in example.branches.items():
            assert f"{example.source}  {branch}: {len(sequence)} tokens, {sequence.supervised} learned" in out
            assert f"[[{tokenizer.decode(sequence.ids[sequence.response]).rstrip()}↵" in out


def test_several_sources_on_the_command_line(data, elsewhere):
    write(elsewhere / "mine", ROWS)
    code, out, err = data(
        "method=sft", "data=mix", "data.sources=[{path: mine, weight: 2}, {path: 'mlxlab://shouting'}]"
    )
    assert code == 0, err
    assert "mine: weight 2 makes 6 of 3 rows, 15.8 % of the training rows" in out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["rows=x"], "data: rows must be an integer >= 0, got 'x'"),
        (["split=test"], "data: split=test does not exist; allowed: train, valid"),
        (["output=x.pdf"], "data: output=x.pdf must be a file ending in .html"),
        (["verbose"], "data: 'verbose' is not of the form key=value; options: rows, split, output"),
        (["data.truncate=keep"], "truncate='keep' does not exist"),
        (["data=mix"], "one of path and sources must be given, got neither; data=mix takes sources"),
        (["data=mix", "data.sources=[{path: x, wight: 2}]"], "did you mean 'weight'?"),
        (["data=mix", "data.sources=[{path: x, weight: 0}]"], "data.sources[0]: weight must be > 0 and finite, got 0"),
        (["data=mix", "data.sources=[x]"], "Value ['x'] of data.sources cannot be used"),
        (["data=everyday", "data.sources=[{path: x}]"], "got path=mlxlab://everyday and 1 sources"),
        (["data=jsonl", "data.path=none"], "data.path=none is neither a folder nor a file"),
        (["data=jsonl", f"data.path={CASES / '22-prompt-fills-window'}", "split=valid"], "no validation rows"),
    ],
)
def test_one_sentence(data, arguments, sentence):
    code, out, err = data(*arguments)
    assert code == 1 and sentence in err + out and "Traceback" not in err


def test_help(data):
    code, out, _ = data("--help")
    assert code == 0 and "learned" in out and "output" in out

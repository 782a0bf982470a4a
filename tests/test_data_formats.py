"""Which files and rows are understood, and what is said about those that are not."""

from __future__ import annotations

import codecs
import json
import sys
import tracemalloc
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import transformers

from mlxlab.data import DataConfig, SourceConfig, load_examples
from mlxlab.data.readers import JsonFile
from mlxlab.data.records import to_record
from mlxlab.errors import ConfigError, DataError

TOKENIZERS = Path(__file__).parent / "data" / "tokenizers"
ROWS = [{"prompt": "hi", "completion": " hello"}, {"prompt": "no", "completion": " yes “ok” 日本 😀"}]


def tokenizer(name="chatml"):
    return transformers.AutoTokenizer.from_pretrained(TOKENIZERS / name)


def load(path, kind="completion", tok=None, **options):
    return load_examples(DataConfig(str(path), **options), tok or tokenizer(), kind)


def ids(dataset, branch="completion"):
    return [example.branches[branch].ids.tolist() for example in dataset.train]


def write(folder, rows, name="train.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return folder


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **rest):
    return {"role": "assistant", "content": content, **rest}


# -------------------------------------------------------------------------------------------------------------- files
@pytest.fixture
def reference(tmp_path):
    return ids(load(write(tmp_path / "reference", ROWS)))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", [b"", codecs.BOM_UTF8])
def test_an_array_is_read_like_lines(tmp_path, reference, indent, bom):
    (tmp_path / "train.json").write_bytes(bom + json.dumps(ROWS, ensure_ascii=False, indent=indent).encode())
    dataset = load(tmp_path)
    assert ids(dataset) == reference
    assert [example.source for example in dataset.train] == ["train.json, row 1", "train.json, row 2"]


def test_a_json_file_may_hold_lines(tmp_path, reference):
    assert ids(load(write(tmp_path, ROWS, "train.json"))) == reference


def test_an_array_in_pieces(tmp_path):
    """Elements longer than what is read at once, and every place where a piece may end."""
    rows = [{"text": "é" * n, "n": n} for n in (0, 70_000, 3, 200_000, *range(200))]
    path = tmp_path / "train.json"
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    assert [value for _, value, _ in JsonFile(path)] == rows


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b'[{"text": "a"}, {"text": "b"]', "row 2, line 1: not valid JSON"),
        (b'[{"text": "a"},\n{"text": "b"}', "row 3, line 2: not valid JSON in UTF-8 (the file ends inside the array)"),
        (b'[{"text": "a"} {"text": "b"}]', "row 2, line 1: not valid JSON in UTF-8 (a comma or the end"),
        (b'[{"text": "a"}] x', "text after the end of the array"),
        (b'[{"text": "a"},]', "row 2, line 1: not valid JSON"),
        (b'[{"text": "\xe9"}]', "invalid continuation byte"),
        (b'[{"text": "a", "text": "b"}, {"text": "c"}]', "the key 'text' is there twice"),
    ],
)
def test_a_broken_array_is_named(tmp_path, content, sentence):
    (tmp_path / "train.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert sentence in str(error.value) and "train.json" in str(error.value)


def test_a_broken_element_does_not_read_the_rest_of_the_file(tmp_path):
    (tmp_path / "train.json").write_text('[{"text": x},' + '{"text": "a"},' * 200_000, encoding="utf-8")
    tracemalloc.start()
    (row,) = JsonFile(tmp_path / "train.json")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # of 3 MB
    tracemalloc.stop()
    assert isinstance(row[1], DataError) and "row 1, line 1" in str(row[1])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_other_encodings_are_named(tmp_path, encoding, name):
    (tmp_path / name).write_bytes(json.dumps(ROWS[0]).encode(encoding))
    with pytest.raises(DataError, match=rf"{name} is UTF-\d\d.*text in UTF-8; convert it first"):
        load(tmp_path)


def test_other_contents_are_named(tmp_path):
    import gzip

    (tmp_path / "train.jsonl").write_bytes(gzip.compress(json.dumps(ROWS[0]).encode()))
    with pytest.raises(DataError, match="compressed with gzip"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"line 2: not valid JSON in UTF-8 \('utf-8' codec can't decode byte 0xe9"):
        load(tmp_path)


def test_a_key_that_is_there_twice(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b", "completion": "c"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1.*the key 'completion' is there twice"):
        load(tmp_path)


def test_parquet(tmp_path, reference):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "train-00000-of-00002.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[1:]), tmp_path / "train-00001-of-00002.parquet")
    dataset = load(tmp_path)
    assert ids(dataset) == reference
    assert dataset.train[1].source == "train-00001-of-00002.parquet, row 1"
    (tmp_path / "train-00000-of-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="train-00000-of-00002.parquet cannot be read as Parquet"):
        load(tmp_path)


def test_keys_that_arrow_fills_with_null_are_not_taught(tmp_path):
    """Objects of one column have the same keys there: without care one call would get the arguments of another."""
    call = lambda **arguments: [{"type": "function", "function": {"name": "sky", "arguments": arguments}}]
    rows = [
        {"messages": [user("hi"), assistant(None, tool_calls=call(city="Oslo"))]},
        {"messages": [user("hi"), assistant(None, tool_calls=call(day="today"))]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert ids(load(tmp_path)) == ids(load(write(tmp_path / "lines", rows)))
    assert "null" not in tokenizer().decode(ids(load(tmp_path))[0])


def test_columns_of_several_formats(tmp_path):
    """Arrow gives every row all columns: the key `prompt` of the first row and `messages` of the second are null."""
    messages = [user("hi"), assistant("yes")]
    columns = {"messages": [messages, None], "prompt": [None, "hi"], "completion": [None, "yes"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    first, second = ids(load(tmp_path))
    assert first == second


def test_packages_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r'needs pyarrow, which is not installed: pip install "mlxlab\[parquet\]"'):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r'neither a folder nor a file here.*pip install "mlxlab\[datasets\]"'):
        load("owner/name")


class HubSplit(list):
    """A split as `datasets` gives it: rows, and the files that they are kept in."""

    def __init__(self, rows, path):
        super().__init__(rows)
        path.write_text("rows", encoding="utf-8")
        self.cache_files = [{"filename": str(path)}]


def hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_a_data_set_of_the_hub(tmp_path, monkeypatch, reference):
    asked = []

    def load_dataset(path, name):
        asked.append((path, name))
        return {"train_sft": HubSplit(ROWS, tmp_path / "a"), "validation": HubSplit(ROWS[:1], tmp_path / "b")}

    hub(monkeypatch, load_dataset)
    source = SourceConfig("owner/name", split="train_sft", name="default")
    dataset = load_examples(DataConfig(None, sources=(source,)), tokenizer(), "completion")
    assert ids(dataset) == reference and asked == [("owner/name", "default")]
    sources = [dataset.train[0].source, dataset.valid[0].source]
    assert sources == ["owner/name train_sft, row 1", "owner/name validation, row 1"]
    with pytest.raises(DataError, match="data.path=owner/name has no split train; allowed: train_sft, validation"):
        load("owner/name")


def test_the_hub_cannot_be_reached(monkeypatch):
    def load_dataset(path, name):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    hub(monkeypatch, load_dataset)
    with pytest.raises(DataError) as error:
        load("owner/name")
    text = str(error.value)
    assert "cannot be fetched from the hub now (Couldn't reach the Hub)" in text and "\n" not in text


@pytest.mark.parametrize("names", [("train.jsonl", "train.json"), ("train.jsonl", "train-00000-of-00001.parquet")])
def test_which_file_is_meant(tmp_path, names):
    for name in names:
        write(tmp_path, ROWS, name)
    with pytest.raises(DataError, match="several files for one split"):
        load(tmp_path)


def test_names_of_splits(tmp_path):
    write(tmp_path, ROWS)
    for name in ("validation", "val", "dev", "valid"):
        write(tmp_path, ROWS[:1], f"{name}.jsonl")
        assert len(load(tmp_path).valid) == 1
        (tmp_path / f"{name}.jsonl").unlink()
    write(tmp_path, ROWS[:1], "other.jsonl")
    source = SourceConfig(str(tmp_path), split="other", valid_split="train")
    dataset = load_examples(DataConfig(None, sources=(source,)), tokenizer(), "completion")
    assert (len(dataset.train), len(dataset.valid)) == (1, 2)
    with pytest.raises(ConfigError, match="is a file, so split and valid_split would have no effect"):
        source = SourceConfig(str(tmp_path / "other.jsonl"), split="test")
        load_examples(DataConfig(None, sources=(source,)), tokenizer(), "completion")
    write(tmp_path, ROWS, "rows.csv")
    with pytest.raises(DataError, match=r"unknown ending '\.csv'; allowed: \.json, \.jsonl, \.ndjson, \.parquet"):
        load(tmp_path / "rows.csv")


# ------------------------------------------------------------------------------------------------------------ weights
def mixed(tmp_path, weights, seed=0, rows=40):
    sources = []
    for number, weight in enumerate(weights):
        folder = write(tmp_path / f"s{number}", [{"prompt": "hi", "completion": f"yes {i}"} for i in range(rows)])
        sources.append(SourceConfig(str(folder), weight))
    return load_examples(DataConfig(None, sources=tuple(sources)), tokenizer(), "completion", seed)


def test_weights_say_how_often_rows_come(tmp_path):
    dataset = mixed(tmp_path, (1, 2.25, 0.5))
    names = [example.source for example in dataset.train]
    counts = [sum(name.startswith(str(tmp_path / f"s{number}/")) for name in names) for number in range(3)]
    assert counts == [40, 90, 20] and len(set(names)) == 40 + 40 + 20
    assert len(dataset.train.lengths) == 150
    assert dataset.train.lengths.tolist() == [len(e.branches["completion"]) for e in dataset.train]
    assert f"{tmp_path / 's1'}: weight 2.25 makes 90 of 40 rows, 60.0 % of the training rows" in dataset.report
    again = [example.source for example in mixed(tmp_path, (1, 2.25, 0.5)).train]
    other = [example.source for example in mixed(tmp_path, (1, 2.25, 0.5), seed=1).train]
    assert names == again != other


def test_several_sources_come_once(tmp_path):
    dataset = mixed(tmp_path, (1, 1))
    assert len({example.source for example in dataset.train}) == len(dataset.train) == 80
    assert [e.source for e in dataset.train[38:42]] == [e.source for e in dataset.train][38:42]


def test_options_of_sources(tmp_path):
    with pytest.raises(DataError, match="weight 0.001 of 40 rows is no row; raise it"):
        mixed(tmp_path, (1, 0.001))
    with pytest.raises(ValueError, match="weight must be > 0 and finite, got 0"):
        SourceConfig("x", 0)
    with pytest.raises(ValueError, match="one of path and sources must be given, got neither"):
        DataConfig(None)
    with pytest.raises(ValueError, match="one of path and sources must be given, got path=x and 1 sources"):
        DataConfig("x", sources=(SourceConfig("y"),))


# --------------------------------------------------------------------------------------------------------------- rows
def test_mixed_formats_are_reported(tmp_path):
    rows = [
        {"messages": [user("hi"), assistant("yes")]},
        {"prompt": "hi", "completion": "yes", "text": "hi yes"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": [user("hi")], "completion": [assistant("yes")]},
        {"text": "hi yes"},
    ]
    dataset = load(write(tmp_path, rows))
    first = ids(dataset)
    assert first[0] == first[1] == first[2] == first[3] != first[4]
    assert "5 rows of 4 formats: 2 prompt + completion, 1 messages, 1 conversations, 1 text" in dataset.report
    assert "1 of 5 rows also have text, which is not used" in dataset.report
    assert not any("formats" in sentence for sentence in load(write(tmp_path, rows[:1])).report)


def test_conversations_with_from_and_value(tmp_path):
    call = {"name": "sky", "arguments": {"city": "Oslo"}}
    rows = [
        {
            "system": "ok",
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": json.dumps(call)},
                {"from": "observation", "value": "blue"},
                {"from": "gpt", "value": "blue"},
            ],
        },
        {
            "messages": [
                {"role": "system", "content": "ok"},
                user("hi"),
                assistant(None, tool_calls=[{"function": {**call, "arguments": json.dumps(call["arguments"])}}]),
                {"role": "tool", "content": "blue"},
                assistant("blue"),
            ]
        },
    ]
    first, second = ids(load(write(tmp_path, rows)))
    assert first == second


def test_preferences_of_conversations(tmp_path):
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")], "messages": []},
    ]
    dataset = load(write(tmp_path, rows), "preference")
    for branch in ("chosen", "rejected"):
        assert len({tuple(stream) for stream in ids(dataset, branch)}) == 1
    assert any("of 3 formats" in sentence for sentence in dataset.report)


CALL = {"name": "sky", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize(
    "call",
    [
        {"function": CALL},
        {"id": "1", "type": "function", "function": CALL},
        {"function": {**CALL, "arguments": '{"city": "Oslo"}'}},
        CALL,
        {**CALL, "arguments": '{"city": "Oslo"}'},
    ],
)
def test_forms_of_a_call(tmp_path, call):
    dataset = load(write(tmp_path, [{"messages": [user("hi"), assistant(None, tool_calls=[call])]}]))
    assert '<call>sky {"city": "Oslo"}</call><|im_end|>' in tokenizer().decode(ids(dataset)[0])


@pytest.mark.parametrize("arguments", [{}, "", "{}", None])
def test_a_call_without_arguments(tmp_path, arguments):
    call = {"function": {"name": "sky", "arguments": arguments}}
    dataset = load(write(tmp_path, [{"messages": [user("hi"), assistant("", tool_calls=[call])]}]))
    assert "<call>sky {}</call>" in tokenizer().decode(ids(dataset)[0])


YES = [user("hi"), assistant("yes")]


@pytest.mark.parametrize(
    "row, kind, sentence",
    [
        ({"prompt": "a"}, "completion", "the key 'completion' is missing (or null)"),
        ({"prompt": "a", "completion": None}, "completion", "the key 'completion' is missing (or null)"),
        ({"completion": "a"}, "completion", "the key 'prompt' is missing"),
        ({"prompt": "a", "chosen": "b"}, "preference", "the key 'rejected' is missing"),
        ({"prompt": "a", "rejected": "b"}, "preference", "the key 'chosen' is missing"),
        ({"prompt": "a", "choosen": "b", "rejected": "b"}, "preference", "is 'choosen' meant to be 'chosen'?"),
        ({"chosen": "a", "rejected": "b"}, "preference", "a preference row needs prompt"),
        ({}, "completion", "keys of this row: none"),
        ({}, "preference", "keys of this row: none"),
        ({"messages": None}, "completion", "a completion row needs messages"),
        ({"messages": [{"content": "a"}]}, "completion", "messages[0] must be an object with role and content"),
        ({"messages": [{"rol": "user", "content": "a"}]}, "completion", "its keys: rol, content"),
        ({"messages": [{"role": "user"}, assistant("a")]}, "completion", "messages[0].content is missing or null"),
        ({"messages": [user(None), assistant("a")]}, "completion", "messages[0].content is missing or null"),
        ({"messages": [user("a"), {"role": "assistant"}]}, "completion", "messages[1].content is missing or null"),
        ({"messages": [user("a"), assistant(None, tool_calls=[])]}, "completion", "messages[1].content is missing"),
        ({"messages": "hi"}, "completion", "messages must be a non-empty list of messages, got str"),
        ({"messages": []}, "completion", "messages must be a non-empty list of messages, got an empty list"),
        ({"messages": [user({"a": 1}), assistant("a")]}, "completion", "must be a string or parts with text, got dict"),
        ({"conversations": [{"value": "a"}]}, "completion", "conversations[0] must be an object with role and content"),
        ({"conversations": [{"from": "human"}]}, "completion", "conversations[0].value is missing or null"),
        ({"conversations": [{"from": "humn", "value": "a"}]}, "completion", "did you mean 'human'?"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "completion", "must end with an assistant turn"),
        ({"chosen": [{"role": "user"}], "rejected": YES}, "preference", "chosen[0].content is missing or null"),
        ({"messages": YES, "tools": "[{"}, "completion", "tools are given as a string that is not JSON"),
        ({"messages": YES, "tools": {"name": "sky"}}, "completion", "tools must be a list of objects"),
        ({"messages": YES, "system": 3}, "completion", "system must be a string"),
        ({"text": "a", "system": "b"}, "completion", "got beside plain text"),
        ({"messages": [{"role": "system", "content": "a"}, *YES], "system": "b"}, "completion", "remove one"),
    ],
)  # fmt: skip
def test_every_place_where_something_can_be_missing(row, kind, sentence):
    with pytest.raises(DataError, match="^x:1: ") as error:
        to_record(row, kind, "x:1")
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "call, sentence",
    [
        ({"function": {"arguments": {}}}, "messages[1]: a tool call has no name; its keys: arguments"),
        ({"function": "sky"}, "function must be an object, got str"),
        ({"function": {"name": "sky", "arguments": "{'a'"}}, "arguments are given as a string that is not JSON"),
        ({"function": {"name": "sky", "arguments": "[1]"}}, "must be an object, or one as a JSON string, got list"),
        ({}, "a tool call has no name; its keys: none"),
    ],
)
def test_calls_that_cannot_be_used(call, sentence):
    with pytest.raises(DataError) as error:
        to_record({"messages": [user("hi"), assistant(None, tool_calls=[call])]}, "completion", "x:1")
    assert sentence in str(error.value)


def test_bad_rows_can_be_skipped(tmp_path):
    rows = [ROWS[0], {"prompt": "a"}, {"prompt": "b"}, ROWS[1]]
    dataset = load(write(tmp_path, rows), bad_rows="skip")
    assert [example.source for example in dataset.train] == ["train.jsonl:1", "train.jsonl:4"]
    assert "2 of 4 rows left out: they cannot be used (train.jsonl:2, train.jsonl:3)" in dataset.report
    with pytest.raises(DataError, match="has no usable row; 2 of 2 rows left out: they cannot be used"):
        load(write(tmp_path, rows[1:3]), bad_rows="skip")

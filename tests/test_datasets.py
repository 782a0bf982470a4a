from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib.resources import files

import pytest

COUNTS = {"everyday": {"train": 200, "valid": 40}, "shouting": {"train": 32, "valid": 16}}
KEYS = {"preference": ["prompt", "chosen", "rejected"], "completion": ["prompt", "completion"]}
FILES = [(name, kind, split) for name in COUNTS for kind in KEYS for split in ("train", "valid")]
SPLITS = [(name, split) for name in COUNTS for split in ("train", "valid")]

GREETINGS = """absolutely alas apologies bless certainly dear excuse forgive gladly goodness greetings hello hey hi hmm
    honestly i'd i'm kindly oh pardon perhaps regrettably sadly sincerely sorry sure thank thanks unfortunately welcome
    well wow""".split()
HEDGES = re.compile(
    r"\b(sorry|apolog\w+|pardon|thanks?|perhaps|maybe|probably|possibly|i think|i believe|i hope|i guess|"
    r"as an assistant|let me know|feel free|happy to help)\b",
    re.IGNORECASE,
)


@cache
def raw(name: str, kind: str, split: str) -> bytes:
    return (files("mlxlab.data") / "sets" / name / kind / f"{split}.jsonl").read_bytes()


@cache
def rows(name: str, kind: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in raw(name, kind, split).decode("utf-8").splitlines()]


def words(text: str) -> list[str]:
    """Words in lower case without punctuation."""
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).split()


def all_everyday() -> list[dict[str, str]]:
    return rows("everyday", "preference", "train") + rows("everyday", "preference", "valid")


@pytest.mark.parametrize("name, kind, split", FILES)
def test_bytes_of_the_file(name: str, kind: str, split: str) -> None:
    data = raw(name, kind, split)
    data.decode("utf-8")
    assert not data.startswith(b"\xef\xbb\xbf")
    assert data.endswith(b"}\n") and b"\r" not in data and b"\n\n" not in data


@pytest.mark.parametrize("name, kind, split", FILES)
def test_count_and_schema(name: str, kind: str, split: str) -> None:
    assert len(rows(name, kind, split)) == COUNTS[name][split]
    for row in rows(name, kind, split):
        assert list(row) == KEYS[kind]
        for text in row.values():
            assert isinstance(text, str) and text and text == text.strip()
            assert not re.search(r"[\n\t]|  ", text), text


@pytest.mark.parametrize("name", COUNTS)
def test_prompts_are_unique_and_splits_disjoint(name: str) -> None:
    prompts = {
        (kind, split): [tuple(words(row["prompt"])) for row in rows(name, kind, split)]
        for kind in KEYS
        for split in ("train", "valid")
    }
    for listed in prompts.values():
        assert [prompt for prompt, count in Counter(listed).items() if count > 1] == []
    train = set(prompts["preference", "train"]) | set(prompts["completion", "train"])
    valid = set(prompts["preference", "valid"]) | set(prompts["completion", "valid"])
    assert train & valid == set()


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_replies_are_unique(name: str, key: str) -> None:
    replies = [row[key] for split in ("train", "valid") for row in rows(name, "preference", split)]
    assert [reply for reply, count in Counter(replies).items() if count > 1] == []


@pytest.mark.parametrize("name, split", SPLITS)
def test_completions_are_the_chosen_replies(name: str, split: str) -> None:
    preference = rows(name, "preference", split)
    expected = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preference]
    assert rows(name, "completion", split) == expected


@pytest.mark.parametrize("split", ["train", "valid"])
def test_everyday_lengths(split: str) -> None:
    for row in rows("everyday", "preference", split):
        assert 5 <= len(row["prompt"].split()) <= 20, row
        assert 8 <= len(row["chosen"].split()) <= 25, row
        assert 25 <= len(row["rejected"].split()) <= 50, row
        assert len(row["chosen"]) < len(row["rejected"]), row


@pytest.mark.parametrize("split", ["train", "valid"])
def test_everyday_chosen_replies_are_direct(split: str) -> None:
    for row in rows("everyday", "preference", split):
        assert row["chosen"].split()[0].strip(",.!").lower() not in GREETINGS, row
        assert not HEDGES.search(row["chosen"]), row
        assert not row["chosen"].endswith("?") or row["prompt"].startswith(("Write", "Rewrite")), row


@pytest.mark.parametrize("end", ["opening", "closing"])
def test_everyday_padding_varies(end: str) -> None:
    part = slice(None, 5) if end == "opening" else slice(-5, None)
    counts = Counter(tuple(words(row["rejected"])[part]) for row in all_everyday())
    assert len(counts) >= 60
    assert counts.most_common(1)[0][1] <= 0.05 * len(all_everyday())
    # Nor does one first word give the rejected replies away.
    first = Counter(words(row["rejected"])[0] for row in all_everyday())
    assert first.most_common(1)[0][1] <= 0.1 * len(all_everyday())


def test_everyday_questions_vary() -> None:
    first = Counter(words(row["prompt"])[0] for row in all_everyday())
    assert len(first) >= 20
    assert first.most_common(1)[0][1] <= 0.35 * len(all_everyday())


@pytest.mark.parametrize("split", ["train", "valid"])
def test_shouting_differs_only_in_case(split: str) -> None:
    for row in rows("shouting", "preference", split):
        assert 2 <= len(row["prompt"].split()) <= 4 and row["prompt"] == row["prompt"].lower(), row
        assert len(row["chosen"]) <= 20 and row["chosen"] == row["chosen"].lower(), row
        assert row["rejected"] == row["chosen"].upper() != row["chosen"], row


def test_shouting_splits_share_no_word_and_train_has_every_letter() -> None:
    train, valid = (rows("shouting", "preference", split) for split in ("train", "valid"))
    seen, unseen = ({word for row in part for text in row.values() for word in words(text)} for part in (train, valid))
    assert seen & unseen == set()
    # A byte-level model cannot generalise to letters that it never trained on.
    assert set("abcdefghijklmnopqrstuvwxyz") <= set("".join(row["chosen"] for row in train))


def test_counts_in_the_readme() -> None:
    text = (files("mlxlab.data") / "sets" / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 30
    for name, counts in COUNTS.items():
        for kind in KEYS:
            assert f"| `{name}` | {kind} | {counts['train']} | {counts['valid']} |" in text

"""From rows to records: the format of every row is recognised by its keys, row by row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Mapping, Sequence

from mlxlab.data.messages import Message, Text, content_of, has_calls, to_messages, to_tools
from mlxlab.errors import DataError

FORMATS = {
    "completion": "messages, conversations, prompt + completion, or text",
    "preference": "prompt + chosen + rejected, or chosen + rejected as message lists with a common beginning",
}
# kind -> keys of each format, the first that fits is used
LAYOUTS = {
    "completion": (("messages",), ("conversations",), ("prompt", "completion"), ("text",)),
    "preference": (("prompt", "chosen", "rejected"), ("conversations", "chosen", "rejected"), ("chosen", "rejected")),
}
KEYS = ("messages", "conversations", "prompt", "completion", "text", "chosen", "rejected", "tools", "system")


@dataclass(frozen=True)
class Record:
    """One row: a prompt (None for plain text), a response per branch, tools for the template, and its place.

    Args:
        format: keys that the row was recognised by.
        unused: keys of other formats that the row has as well.
    """

    prompt: Text | None
    responses: Mapping[str, Text]
    source: str
    tools: tuple[Any, ...] | None = None
    format: str = ""
    unused: tuple[str, ...] = ()


def to_record(row: Any, kind: str, source: str) -> Record:
    """Recognise the format of a row by its keys. A key whose value is null counts as missing.

    Args:
        kind: "completion" or "preference", what the method needs.

    Raises:
        DataError: the row has no known format for `kind`, or a value that cannot be used; names the place.
    """
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        raise DataError(f"{source}: a row must be a JSON object, got {type(row).__name__}.")
    row = {key: value for key, value in row.items() if value is not None}
    tools = to_tools(row.get("tools"), source)
    make = _completion if kind == "completion" else _preference
    prompt, responses = make(row, source)
    prompt = _with_system(prompt, row.get("system"), source)
    for branch, response in responses.items():
        if not content_of(response).strip() and not has_calls(response):
            raise DataError(f"{source}: the {branch} response is empty; remove the row or give it an answer.")
    if len(responses) > 1 and len({_comparable(r) for r in responses.values()}) == 1:
        raise DataError(f"{source}: {' and '.join(responses)} are identical, so there is nothing to prefer.")
    return Record(prompt, responses, source, tools, *_format(row, kind))


def _format(row: Mapping[str, Any], kind: str) -> tuple[str, tuple[str, ...]]:
    keys = next((keys for keys in LAYOUTS[kind] if all(key in row for key in keys)), ())
    lists = kind == "preference" and not isinstance(row[keys[-1]], str)
    unused = [key for key in KEYS if key in row and key not in (*keys, "tools", "system", "messages")]
    return " + ".join(keys) + (" (messages)" if lists else ""), tuple(unused)


def _completion(row: Mapping[str, Any], source: str) -> tuple[Text | None, dict[str, Text]]:
    if "chosen" in row or "rejected" in row:
        raise DataError(f"{source}: this is a preference row; sft needs {FORMATS['completion']}.")
    for key in ("messages", "conversations"):
        if key in row:
            messages = to_messages(row[key], key, source)
            if messages[-1]["role"] != "assistant":
                raise DataError(f"{source}: {key} must end with an assistant turn, which is what is learned.")
            return messages[:-1], {"completion": messages[-1:]}
    if "prompt" in row or "completion" in row:
        prompt, completion = _value(row, "prompt", source), _value(row, "completion", source)
        if not isinstance(completion, str):
            prompt = _conversation(prompt)
        return prompt, {"completion": _same_form(prompt, completion, "completion", source)}
    if "text" in row:
        text = row["text"]
        if not isinstance(text, str):
            raise DataError(f"{source}: text must be a string, got {type(text).__name__}.")
        return None, {"completion": text}
    raise _unknown(row, "completion", ("messages", "conversations", "prompt", "completion", "text"), source)


def _preference(row: Mapping[str, Any], source: str) -> tuple[Text | None, dict[str, Text]]:
    if "chosen" not in row and "rejected" not in row:
        raise _unknown(row, "preference", ("prompt", "chosen", "rejected"), source)
    responses = {branch: _value(row, branch, source) for branch in ("chosen", "rejected")}
    key = next((key for key in ("prompt", "conversations") if key in row), None)
    if key:
        prompt = _value(row, key, source)
        if not isinstance(responses["chosen"], str):
            prompt = _conversation(prompt)
        return prompt, {b: _same_form(prompt, r, b, source) for b, r in responses.items()}
    chosen, rejected = responses.values()
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise _unknown(row, "preference", ("prompt", "chosen", "rejected"), source)
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise DataError(f"{source}: without a prompt, chosen and rejected must begin with the same messages.")
    prompt = chosen[:common]
    return prompt, {b: _same_form(prompt, r, b, source) for b, r in responses.items()}


def _with_system(prompt: Text | None, system: Any, source: str) -> Text | None:
    """Some data sets keep the system turn beside the conversation."""
    if system is None or system == "":
        return prompt
    if not isinstance(system, str) or prompt is None:
        received = "beside plain text" if isinstance(system, str) else type(system).__name__
        raise DataError(f"{source}: system must be a string beside a prompt or a conversation, got {received}.")
    prompt = _conversation(prompt)
    if prompt and prompt[0]["role"] == "system":
        raise DataError(f"{source}: there is a system turn both in the conversation and under system; remove one.")
    return ({"role": "system", "content": system}, *prompt)


def _value(row: Mapping[str, Any], key: str, source: str) -> Text:
    """A string or a message list under `key`; one message by itself is a list of one."""
    if key not in row:
        raise DataError(
            f"{source}: the key {key!r} is missing (or null); keys of this row: {', '.join(row) or 'none'}"
            f"{_close(key, row)}."
        )
    value = row[key]
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        return to_messages(value, key, source)
    if not isinstance(value, str):
        raise DataError(f"{source}: {key} must be a string or a list of messages, got {type(value).__name__}.")
    return value


def _same_form(prompt: Text, response: Text, branch: str, source: str) -> Text:
    """A response to a conversation is one assistant turn; a list may repeat the prompt before it."""
    if isinstance(response, str):
        return response if isinstance(prompt, str) else ({"role": "assistant", "content": response},)
    if isinstance(prompt, str):
        raise DataError(f"{source}: {branch} is a list of messages but prompt is a string; use one form for both.")
    response = response[len(prompt) :] if response[: len(prompt)] == prompt else response
    roles = [message["role"] for message in response]
    if roles != ["assistant"]:
        raise DataError(
            f"{source}: {branch} must add one assistant turn to the prompt, got {', '.join(roles) or 'none'}; put the "
            "turns before the last one into prompt."
        )
    return response


def _conversation(prompt: Text) -> tuple[Message, ...]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _comparable(text: Text) -> str:
    return text if isinstance(text, str) else json.dumps(text, sort_keys=True)


def _unknown(row: Mapping[str, Any], kind: str, keys: Sequence[str], source: str) -> DataError:
    hints = "".join(dict.fromkeys(_close(key, row) for key in keys))
    return DataError(
        f"{source}: a {kind} row needs {FORMATS[kind]}; keys of this row: {', '.join(row) or 'none'}{hints}."
    )


def _close(key: str, row: Mapping[str, Any]) -> str:
    close = get_close_matches(key, [name for name in row if name not in KEYS], n=1, cutoff=0.7)
    return f" (is {close[0]!r} meant to be {key!r}?)" if close else ""

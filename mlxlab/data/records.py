"""From files to records: rows are read line by line, and their format is recognised row by row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from mlxlab.errors import DataError, nearest

Message = dict[str, Any]
Text = str | tuple[Message, ...]  # raw text, or turns of a conversation

FORMATS = {
    "completion": "messages, prompt + completion, or text",
    "preference": "prompt + chosen + rejected, or chosen + rejected as message lists with a common beginning",
}
KEYS = ("messages", "prompt", "completion", "text", "chosen", "rejected", "tools")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Record:
    """One row: a prompt (None for plain text), a response per branch, tools for the template, and its place."""

    prompt: Text | None
    responses: Mapping[str, Text]
    source: str
    tools: tuple[Any, ...] | None = None


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(source, value) of each line of a JSONL file: UTF-8, with or without a byte-order mark; blank lines are skipped.

    The value of a line that is not JSON or not UTF-8 is the DataError that says so, with file and line: a generator
    that raised it could not go on to the lines after.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            source = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
                if b"\\ud" in line.lower():  # half a surrogate pair, which JSON can spell, is no text
                    json.dumps(value, ensure_ascii=False).encode("utf-8")
            except (json.JSONDecodeError, UnicodeError) as error:
                value = DataError(f"{path}, line {number}: not valid JSON in UTF-8 ({error}).")
            yield source, value


def to_record(row: Any, kind: str, source: str) -> Record:
    """Recognise the format of a row by its keys.

    Args:
        kind: "completion" or "preference", what the method needs.

    Raises:
        DataError: the row has no known format for `kind`, or a value that cannot be used; names the place.
    """
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        raise DataError(f"{source}: a row must be a JSON object, got {type(row).__name__}.")
    tools = row.get("tools")
    make = _completion if kind == "completion" else _preference
    prompt, responses = make(row, source)
    for branch, response in responses.items():
        if not _content(response).strip() and not _has_calls(response):
            raise DataError(f"{source}: the {branch} response is empty; remove the row or give it an answer.")
    if len(responses) > 1 and len({_comparable(r) for r in responses.values()}) == 1:
        raise DataError(f"{source}: {' and '.join(responses)} are identical, so there is nothing to prefer.")
    return Record(prompt, responses, source, tuple(tools) if tools else None)


def _completion(row: Mapping[str, Any], source: str) -> tuple[Text | None, dict[str, Text]]:
    if "chosen" in row:
        raise DataError(f"{source}: this is a preference row; sft needs {FORMATS['completion']}.")
    if "messages" in row:
        messages = _messages(row["messages"], "messages", source)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last != len(messages) - 1:
            raise DataError(f"{source}: messages must end with an assistant turn, which is what is learned.")
        return messages[:last], {"completion": messages[last:]}
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
    raise _unknown(row, "completion", ("messages", "prompt", "completion", "text"), source)


def _preference(row: Mapping[str, Any], source: str) -> tuple[Text | None, dict[str, Text]]:
    if "chosen" not in row and "rejected" not in row:
        raise _unknown(row, "preference", ("prompt", "chosen", "rejected"), source)
    responses = {branch: _value(row, branch, source) for branch in ("chosen", "rejected")}
    if "prompt" in row:
        prompt = _value(row, "prompt", source)
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


def _value(row: Mapping[str, Any], key: str, source: str) -> Text:
    """A string or a message list under `key`."""
    if key not in row:
        raise DataError(f"{source}: the key {key!r} is missing; keys of this row: {', '.join(row)}{_close(key, row)}.")
    value = row[key]
    if isinstance(value, list):
        return _messages(value, key, source)
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


def _messages(value: Any, key: str, source: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{source}: {key} must be a non-empty list of messages, got {type(value).__name__}.")
    result = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{source}: {key}[{number}] must be an object with role and content.")
        if message["role"] not in ROLES:
            raise DataError(f"{source}: {key}[{number}].role={message['role']!r}; {nearest(message['role'], ROLES)}.")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, (str, type(None))):
            raise DataError(
                f"{source}: {key}[{number}].content must be a string or parts with text, got {type(content).__name__}."
            )
        result.append({**message, "content": content or "", **_calls(message, source)})
    return tuple(result)


def _calls(message: Message, source: str) -> dict[str, Any]:
    """Tool calls with arguments as an object: templates serialise them, and would serialise a string twice."""
    if not message.get("tool_calls"):
        return {}
    calls = []
    if not isinstance(message["tool_calls"], list) or not all(isinstance(c, dict) for c in message["tool_calls"]):
        raise DataError(f"{source}: tool_calls must be a list of objects.")
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise DataError(f"{source}: function of a tool call must be an object, got {type(function).__name__}.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                raise DataError(f"{source}: tool call arguments are a string but not JSON ({error}).") from error
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {"tool_calls": calls}


def _content(text: Text) -> str:
    return text if isinstance(text, str) else "".join(str(message["content"] or "") for message in text)


def _has_calls(text: Text) -> bool:
    return not isinstance(text, str) and any(message.get("tool_calls") for message in text)


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

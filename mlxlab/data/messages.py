"""Turns of a conversation: the spellings in use become one, and what a template would drop or spoil is refused."""

from __future__ import annotations

import json
from typing import Any, Mapping

from mlxlab.errors import DataError, nearest

Message = dict[str, Any]
Text = str | tuple[Message, ...]  # raw text, or turns of a conversation

ROLES = ("system", "developer", "user", "assistant", "tool")
# `from` of ShareGPT's form {"from": ..., "value": ...} -> role
SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def to_messages(value: Any, key: str, source: str) -> tuple[Message, ...]:
    """A checked list of {"role", "content", ...}; accepts {"from", "value"} as well.

    Raises:
        DataError: no list, no role, no content, an unknown role, tool calls that cannot be read.
    """
    if not isinstance(value, list) or not value:
        received = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{source}: {key} must be a non-empty list of messages, got {received}.")
    return tuple(_message(message, f"{key}[{number}]", source) for number, message in enumerate(value))


def to_tools(value: Any, source: str) -> tuple[Any, ...] | None:
    """Descriptions of tools, a list of objects or the same as a JSON string; None for none."""
    if isinstance(value, str) and value.strip():
        value = _parse(value, "tools", source)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{source}: tools must be a list of objects, or the same as a JSON string.")
    return tuple(value)


def call_names(messages: tuple[Message, ...]) -> list[str]:
    """Names of the functions that are called."""
    return [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]


def content_of(text: Text) -> str:
    """All that is said, without tool calls."""
    return text if isinstance(text, str) else "".join(message["content"] for message in text)


def has_calls(text: Text) -> bool:
    return not isinstance(text, str) and any(message.get("tool_calls") for message in text)


def _message(message: Any, where: str, source: str) -> Message:
    if not isinstance(message, dict) or not ("role" in message or "from" in message):
        keys = f"; its keys: {', '.join(message) or 'none'}" if isinstance(message, dict) else ""
        raise DataError(f"{source}: {where} must be an object with role and content (or from and value){keys}.")
    if "role" in message:
        name, allowed, text = "role", {role: role for role in ROLES}, "content"
    else:
        name, allowed, text = "from", SPEAKERS, "value"
    speaker = message[name]
    if not isinstance(speaker, str) or speaker not in allowed:
        raise DataError(f"{source}: {where}.{name}={speaker!r}; {nearest(speaker, allowed)}.")
    content, calls = message.get(text), message.get("tool_calls")
    if speaker == "function_call" and name == "from":
        call = _parse(content, f"{where}.value", source) if isinstance(content, str) else content
        content, calls = None, call if isinstance(call, list) else [call]
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is None and not (allowed[speaker] == "assistant" and calls):
        raise DataError(
            f"{source}: {where}.{text} is missing or null, which only an assistant turn with tool_calls may be; keys "
            f"of this message: {', '.join(message)}."
        )
    if not isinstance(content, (str, type(None))):
        raise DataError(f"{source}: {where}.{text} must be a string or parts with text, got {type(content).__name__}.")
    rest = {key: value for key, value in message.items() if key not in (name, text, "tool_calls")}
    result = {"role": allowed[speaker], "content": content or "", **rest}
    return {**result, "tool_calls": _calls(calls, where, source)} if calls else result


def _calls(calls: Any, where: str, source: str) -> list[Message]:
    """{"type", "function": {"name", "arguments"}} with arguments as an object: templates serialise them themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{source}: {where}: tool_calls must be a list of objects.")
    result = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise DataError(f"{source}: {where}: function must be an object, got {type(function).__name__}.")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(f"{source}: {where}: a tool call has no name; its keys: {', '.join(function) or 'none'}.")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            arguments = _parse(arguments, f"{where}: tool call arguments", source)
        arguments = {} if arguments in (None, "") else arguments
        if not isinstance(arguments, Mapping):
            raise DataError(
                f"{source}: {where}: tool call arguments must be an object, or one as a JSON string, got "
                f"{type(arguments).__name__}."
            )
        outside = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
        result.append({"type": "function", **outside, "function": {**function, "arguments": arguments}})
        if "function" not in call:
            result[-1]["function"] = {"name": function["name"], "arguments": arguments}
    return result


def _parse(text: str, what: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{source}: {what} are given as a string that is not JSON ({error}).") from error

"""One parsed row, whatever its format, as a prompt and one response per branch.

    completion   {"messages": [..., assistant]}, {"prompt", "completion"}, {"text"}
    preference   {"prompt", "chosen", "rejected"}; conversations may leave "prompt" out

Prompts and responses are strings or chat messages. "tools" is handed on to the chat template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Callable, Mapping

from mlxlab.data.records import RowError, json_type

Message = dict[str, Any]  # role, content (a string), tool_calls, and what else the chat template reads

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """What a row says, before any tokenizer.

    Args:
        prompt: raw string, list of messages, or None for plain text (all of it is response).
        responses: branch -> string, or assistant message.
        tools: definitions for the chat template.
        unused: keys of the row that were not read.
    """

    prompt: str | list[Message] | None
    responses: Mapping[str, str | Message]
    tools: list[Any] | None = None
    unused: frozenset[str] = frozenset()


def normalise(values: Mapping[str, Any], records: str) -> Row:
    """The row of one parsed line.

    Raises:
        RowError: keys are missing or have the wrong type, a response is empty, a conversation does not end in one.
    """
    prompt, responses, used = _FORMATS[records](values)
    tools = values.get("tools")
    if tools is not None:
        tools = _expect(values, "tools", list)
        used += ("tools",)
    for branch, response in responses.items():
        if _is_empty(response):
            raise RowError(f"the response in {_key(branch, used)} is empty; write one, or remove the row")
    return Row(prompt, responses, tools, frozenset(values) - set(used))


# ------------------------------------------------------------------------------------------------------------ records
_Parts = tuple[str | list[Message] | None, dict[str, str | Message], tuple[str, ...]]


def _completion(values: Mapping[str, Any]) -> _Parts:
    if "messages" in values:
        messages = read_messages(values, "messages")
        if messages[-1]["role"] != "assistant":
            raise RowError(
                f"'messages' must end with an assistant turn, which is the response; the last turn is "
                f"{messages[-1]['role']!r}; remove what follows the last assistant turn"
            )
        if len(messages) == 1:
            raise RowError("'messages' has a response and no prompt; put a user turn before it")
        return messages[:-1], {"completion": messages[-1]}, ("messages",)
    if "prompt" in values and "completion" in values:
        prompt, completion = _text_or_messages(values, "prompt"), _text_or_messages(values, "completion")
        if isinstance(completion, list):
            prompt = _as_messages(prompt)
            completion = _reply(completion, "completion")
        return prompt, {"completion": completion}, ("prompt", "completion")
    if "text" in values:
        return None, {"completion": _expect(values, "text", str)}, ("text",)
    if "chosen" in values and "rejected" in values:
        raise RowError(
            "this is a preference row ('chosen', 'rejected') and the method trains on completions; choose method=orpo "
            "or method=dpo, or give 'prompt' and 'completion', 'messages', or 'text'"
        )
    for key, other in (("completion", "prompt"), ("prompt", "completion")):
        if other in values:
            raise _missing(values, key)
    raise _shapeless(values, ("messages", "prompt", "completion", "text"), "'messages', 'prompt' and 'completion', or 'text'")


def _preference(values: Mapping[str, Any]) -> _Parts:
    known = ("prompt", "chosen", "rejected")
    if "chosen" not in values and "rejected" not in values:
        if {"messages", "completion", "text"} & set(values):
            raise RowError(
                "this is a completion row and the method trains on pairs; choose method=sft, or give 'prompt', 'chosen' "
                "and 'rejected'"
            )
        raise _shapeless(values, known, "'prompt', 'chosen' and 'rejected'")
    for key in ("chosen", "rejected"):
        if key not in values:
            raise _missing(values, key)
    chosen, rejected = _text_or_messages(values, "chosen"), _text_or_messages(values, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("'chosen' and 'rejected' must both be strings or both be lists of messages")
    if "prompt" not in values and isinstance(chosen, str):
        raise _missing(values, "prompt")
    prompt = _text_or_messages(values, "prompt") if "prompt" in values else None
    if isinstance(chosen, str):
        return prompt, {"chosen": chosen, "rejected": rejected}, known

    if prompt is None:
        prompt = _common_beginning(chosen, rejected)
        if not prompt:
            raise RowError("'chosen' and 'rejected' have no turn in common, so there is no prompt; add 'prompt'")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = _as_messages(prompt)
        # some sets repeat the prompt at the beginning of both conversations
        chosen, rejected = (turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns for turns in (chosen, rejected))
    return prompt, {"chosen": _reply(chosen, "chosen"), "rejected": _reply(rejected, "rejected")}, known


_FORMATS: dict[str, Callable[[Mapping[str, Any]], _Parts]] = {"completion": _completion, "preference": _preference}


def _common_beginning(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The turns that both conversations start with; the last turn of each is always a response."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]


def _reply(turns: list[Message], key: str) -> Message:
    """The one assistant turn that a conversation adds to its prompt."""
    roles = [turn["role"] for turn in turns]
    if roles != ["assistant"]:
        raise RowError(
            f"{key!r} must add exactly one assistant turn to the prompt, got {', '.join(roles) or 'none'}; put the turns "
            "before the last one into 'prompt'"
        )
    return turns[0]


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


# ----------------------------------------------------------------------------------------------------------- messages
def read_messages(values: Mapping[str, Any], key: str) -> list[Message]:
    """A list of chat turns in the form that chat templates expect."""
    turns = _expect(values, key, list)
    if not turns:
        raise RowError(f"{key!r} is an empty list; give at least one turn")
    return [_read_message(turn, f"turn {number} of {key!r}") for number, turn in enumerate(turns, 1)]


def _read_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"{where} must be an object with 'role' and 'content', got {json_type(turn)}")
    role = turn.get("role")
    if "role" not in turn:
        raise RowError(f"{where}: {_missing(turn, 'role')}")
    if role not in ROLES:
        close = get_close_matches(str(role), ROLES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RowError(f"{where} has role {role!r}; allowed: {', '.join(ROLES)}{hint}")
    message = dict(turn)
    calls = turn.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RowError(f"'tool_calls' of {where} must be a list, got {json_type(calls)}")
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    elif "content" not in turn:
        raise RowError(f"{where}: {_missing(turn, 'content')}")
    message["content"] = _read_content(turn.get("content"), where)
    return message


def _read_content(content: Any, where: str) -> str:
    """A string; null is empty, and parts of type "text" are joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        raise RowError(f"'content' of {where} has parts that are not text; only text can be trained on")
    if not isinstance(content, str):
        raise RowError(f"'content' of {where} must be a string, got {json_type(content)}")
    return content


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates serialise them, and would serialise a string twice."""
    if not isinstance(call, dict):
        raise RowError(f"'tool_calls' of {where} must hold objects, got {json_type(call)}")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _read_call(call["function"], where)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise RowError(f"the arguments of a tool call in {where} are not JSON ({error.msg})") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise RowError(f"the arguments of a tool call in {where} must be an object, got {json_type(arguments)}")
    return {**call, "arguments": arguments or {}}


# --------------------------------------------------------------------------------------------------------------- keys
def _expect(values: Mapping[str, Any], key: str, cls: type) -> Any:
    if not isinstance(values[key], cls):
        wanted = {str: "a string", list: "a list"}[cls]
        raise RowError(f"key {key!r} must be {wanted}, got {json_type(values[key])}")
    return values[key]


def _text_or_messages(values: Mapping[str, Any], key: str) -> str | list[Message]:
    value = values[key]
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return read_messages(values, key)
    raise RowError(f"key {key!r} must be a string or a list of messages, got {json_type(value)}")


def _is_empty(response: str | Message) -> bool:
    if isinstance(response, str):
        return not response.strip()
    return not response["content"].strip() and not response.get("tool_calls")


def _key(branch: str, used: tuple[str, ...]) -> str:
    return repr(branch if branch in used else used[0])


def _missing(values: Mapping[str, Any], key: str) -> RowError:
    close = get_close_matches(key, values, n=1)
    hint = f"; rename {close[0]!r} to {key!r}?" if close else ""
    return RowError(f"key {key!r} is missing; the row has {_names(values)}{hint}")


def _shapeless(values: Mapping[str, Any], known: tuple[str, ...], wanted: str) -> RowError:
    close = [(key, match[0]) for key in values if (match := get_close_matches(key, known, n=1)) and key not in known]
    hint = f"; rename {close[0][0]!r} to {close[0][1]!r}?" if close else ""
    return RowError(f"a row needs {wanted}; this one has {_names(values)}{hint}")


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in values) or "no keys"

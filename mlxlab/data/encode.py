"""Token streams exactly as inference sees them, and where the response begins."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np
from jinja2.exceptions import TemplateError

from mlxlab.data.records import Message, Record, Text
from mlxlab.errors import ConfigError, DataError
from mlxlab.interfaces import Example, TokenSequence


class TooLong(Exception):
    """A row so far beyond `max_tokens` that it is left out without being encoded."""


@dataclass(frozen=True)
class Encoder:
    """Turns records into examples.

    Args:
        tokenizer: a fast tokenizer of transformers.
        chat: render string prompts as a user turn through the chat template; otherwise they are raw text.
        max_characters: longer prompts and responses raise `TooLong`, and plain text is cut there; bounds memory.
    """

    tokenizer: Any
    chat: bool
    max_characters: float = math.inf

    @classmethod
    def of(cls, tokenizer: Any, template: str, max_tokens: int | None = None) -> Encoder:
        """`template` is "auto" (chat if there is a template), "chat" or "raw"; mlx-lm's wrapper is unwrapped."""
        tokenizer = (
            getattr(tokenizer, "_tokenizer", tokenizer) if type(tokenizer).__name__ == "TokenizerWrapper" else tokenizer
        )
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            raise ConfigError("data.template=chat, but this tokenizer has no chat template; use data.template=raw.")
        # No token has more characters than the longest of the vocabulary; four times that leaves room for tokenizers
        # that compose or drop characters first.
        longest = max(map(len, tokenizer.get_vocab()))
        limit = math.inf if max_tokens is None else 4 * max_tokens * longest
        return cls(tokenizer, has_template if template == "auto" else template == "chat", limit)

    def __call__(self, record: Record) -> Example:
        """Encode every branch of a record.

        Raises:
            DataError: the chat template refuses the row (its own message is quoted), or no token can be learned.
            TooLong: the row cannot fit, whatever its tokens are.
        """
        if record.prompt is None:
            branches = {branch: self._text(text) for branch, text in record.responses.items()}
        elif any(characters(text) > self.max_characters for text in (record.prompt, *record.responses.values())):
            raise TooLong
        elif isinstance(record.prompt, str) and not self.chat:
            branches = self._raw(record.prompt, record.responses)
        else:
            branches = self._conversation(record)
        for branch, sequence in branches.items():
            if not sequence.supervised:
                raise DataError(f"{record.source}: no token of the {branch} response can be learned.")
        return Example(branches, record.source)

    def _text(self, text: str) -> TokenSequence:
        return _sequence(self._with_eos(self._with_bos(self._ids(text[: min(len(text), self.max_characters)]))), 0)

    def _conversation(self, record: Record) -> dict[str, TokenSequence]:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"{record.source}: messages need a chat template, which this tokenizer lacks; give prompt and response "
                "as strings."
            )
        try:
            before, full = self._render_row(record)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"{record.source}: the chat template refuses this row: {error}") from error
        # A template prints its own beginning-of-sequence token; adding one here would make two.
        ids = self._ids(before)
        return {
            branch: _sequence(self._continue(ids, self._ids(text), text[len(before) :]), len(ids))
            for branch, text in full.items()
        }

    def _render_row(self, record: Record) -> tuple[str, dict[str, str]]:
        """The text of the prompt, which all branches begin with, and the whole text of each branch."""
        tools = None if record.tools is None else list(record.tools)
        prompt = _turns(record.prompt, "user")
        responses = {branch: _turns(response, "assistant") for branch, response in record.responses.items()}
        before = self._render(prompt, tools, True) if prompt else ""
        full = {branch: self._render([*prompt, *turns], tools, False) for branch, turns in responses.items()}
        if all(text.startswith(before) for text in full.values()):
            return before, full
        # Some templates open a block for the answer (such as thinking) that a finished turn does not have. The prompt
        # then ends where they part; two made-up answers make sure that it holds no character of a real one.
        turn = next(iter(responses.values()))[-1]
        made_up = [self._render([*prompt, {**turn, "content": content}], tools, False) for content in ("a", "b")]
        shared = os.path.commonprefix([before, *full.values(), *made_up])
        if len(shared) < len(os.path.commonprefix([before, self._render(prompt, tools, False)])):
            raise DataError(
                f"{record.source}: the chat template writes the turns before the answer differently once the answer is "
                "there, so training would not see what generation sees; give strings with data.template=raw."
            )
        return shared, full

    def _raw(self, prompt: str, responses: Mapping[str, str]) -> dict[str, TokenSequence]:
        if len(responses) == 1:
            return {branch: self._joint(prompt, response) for branch, response in responses.items()}
        # branches of a pair continue the same tokens, as generation would
        ids = self._with_bos(self._ids(prompt))
        return {
            branch: _sequence(
                self._with_eos(self._continue(ids, self._with_bos(self._ids(prompt + response)), response)), len(ids)
            )
            for branch, response in responses.items()
        }

    def _joint(self, prompt: str, response: str) -> TokenSequence:
        """Joint encoding; the response begins with the first token that has any of its characters."""
        encoded = self.tokenizer(
            prompt + response, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        boundary = sum(end <= len(prompt) for _, end in encoded["offset_mapping"])
        ids = self._with_bos(encoded["input_ids"])
        return _sequence(self._with_eos(ids), boundary + len(ids) - len(encoded["input_ids"]))

    def _continue(self, prompt: list[int], whole: list[int], response: str) -> list[int]:
        """`whole` if it begins with the prompt; otherwise split where generation would start a new token."""
        return whole if whole[: len(prompt)] == prompt else prompt + self._ids(response)

    def _render(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Raw text gets the beginning that this tokenizer gives to raw text; never two of them."""
        bos = self.tokenizer.bos_token_id
        wants = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        return [bos, *ids] if wants and ids[:1] != [bos] else list(ids)

    def _with_eos(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def truncate(example: Example, max_tokens: int, bos: int | None, plain_text: bool = False) -> Example | None:
    """Cut an example to `max_tokens` per branch without touching a response; None if that cannot be done sensibly.

    That is, if a response does not fit, or if the prompt alone fills the window: what is left of it would be another
    question. The prompt loses tokens after its beginning-of-sequence token, in all branches the same ones (by the
    longest branch), so that they still share it. Plain text loses its end.
    """
    excess = max(map(len, example.branches.values())) - max_tokens
    if excess <= 0:
        return example
    prompt = min(int(sequence.response.argmax()) for sequence in example.branches.values())
    if plain_text:
        cut = {name: slice(max_tokens, None) for name in example.branches}
    else:
        sequences = list(example.branches.values())
        first = int(bos is not None and prompt > 0 and all(s.ids[0] == bos for s in sequences))
        # one prompt token must be left to predict the first response token
        if prompt >= max_tokens or excess > prompt - first - 1:
            return None
        cut = {name: slice(first, first + excess) for name in example.branches}
    branches = {
        name: TokenSequence(np.delete(sequence.ids, cut[name]), np.delete(sequence.response, cut[name]))
        for name, sequence in example.branches.items()
    }
    return Example(branches, example.source)


def characters(text: Text) -> int:
    """Of the contents; at most what a template prints."""
    return len(text) if isinstance(text, str) else sum(len(turn["content"]) for turn in text)


def _turns(text: Text, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _sequence(ids: list[int], boundary: int) -> TokenSequence:
    array = np.asarray(ids, np.int32)
    return TokenSequence(array, np.arange(len(array)) >= boundary)

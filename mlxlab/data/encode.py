"""Token streams exactly as inference sees them, and where the response begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from mlxlab.data.records import Message, Record, Text
from mlxlab.errors import ConfigError, DataError
from mlxlab.interfaces import Example, TokenSequence


@dataclass(frozen=True)
class Encoder:
    """Turns records into examples.

    Args:
        tokenizer: a fast tokenizer of transformers.
        chat: render string prompts as a user turn through the chat template; otherwise they are raw text.
    """

    tokenizer: Any
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any, template: str) -> Encoder:
        """`template` is "auto" (chat if there is a template), "chat" or "raw"; mlx-lm's wrapper is unwrapped."""
        tokenizer = (
            getattr(tokenizer, "_tokenizer", tokenizer) if type(tokenizer).__name__ == "TokenizerWrapper" else tokenizer
        )
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            raise ConfigError("data.template=chat, but this tokenizer has no chat template; use data.template=raw.")
        return cls(tokenizer, has_template if template == "auto" else template == "chat")

    def __call__(self, record: Record) -> Example:
        """Encode every branch of a record.

        Raises:
            DataError: the chat template refuses the row (its own message is quoted), or no token can be learned.
        """
        branches = {branch: self._branch(record, response) for branch, response in record.responses.items()}
        for branch, sequence in branches.items():
            if not sequence.supervised:
                raise DataError(f"{record.source}: no token of the {branch} response can be learned.")
        return Example(branches, record.source)

    def _branch(self, record: Record, response: Text) -> TokenSequence:
        if record.prompt is None:
            ids = self._with_bos(self._ids(response)) + self._eos()
            return _sequence(ids, 0)
        if isinstance(record.prompt, str) and not self.chat:
            return self._raw(record.prompt, response)
        prompt = _turns(record.prompt, "user")
        return self._conversation(prompt, _turns(response, "assistant"), record)

    def _conversation(self, prompt: list[Message], response: list[Message], record: Record) -> TokenSequence:
        tools = None if record.tools is None else list(record.tools)
        try:
            before = self._render(prompt, tools, True) if prompt else ""
            full = self._render([*prompt, *response], tools, False)
        except (TemplateError, TypeError, KeyError) as error:
            raise DataError(f"{record.source}: the chat template refuses this row: {error}") from error
        # Some templates open a block for the answer (such as thinking) that a finished turn does not have.
        before = os.path.commonprefix([before, full])
        # A template prints its own beginning-of-sequence token; adding one here would make two.
        ids, whole = self._ids(before), self._ids(full)
        if whole[: len(ids)] != ids:  # merged across the seam, where generation would start a new token
            whole = ids + self._ids(full[len(before) :])
        return _sequence(whole, len(ids))

    def _raw(self, prompt: str, response: str) -> TokenSequence:
        """Joint encoding; the response begins with the first token that has any of its characters."""
        encoded = self.tokenizer(prompt + response, add_special_tokens=False, return_offsets_mapping=True)
        boundary = sum(end <= len(prompt) for _, end in encoded["offset_mapping"])
        ids = self._with_bos(encoded["input_ids"])
        return _sequence(ids + self._eos(), boundary + len(ids) - len(encoded["input_ids"]))

    def _render(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Raw text gets the beginning that this tokenizer gives to raw text; never two of them."""
        bos = self.tokenizer.bos_token_id
        wants = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        return [bos, *ids] if wants and ids[:1] != [bos] else list(ids)

    def _eos(self) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return [] if eos is None else [eos]


def truncate(example: Example, max_tokens: int, bos: int | None) -> Example | None:
    """Cut an example to `max_tokens` per branch without touching a response; None if that cannot be done sensibly.

    That is, if a response does not fit, or if the prompt alone fills the window: what is left of it would be another
    question. The prompt loses tokens after its beginning-of-sequence token, in all branches the same ones (by the longest
    branch), so that they still share it. Plain text, which has no prompt, loses its end.
    """
    excess = max(map(len, example.branches.values())) - max_tokens
    if excess <= 0:
        return example
    prompt = min(int(sequence.response.argmax()) for sequence in example.branches.values())
    if all(sequence.response.all() for sequence in example.branches.values()):
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


def _turns(text: Text, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _sequence(ids: list[int], boundary: int) -> TokenSequence:
    array = np.asarray(ids, np.int32)
    return TokenSequence(array, np.arange(len(array)) >= boundary)

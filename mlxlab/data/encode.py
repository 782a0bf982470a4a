"""Token streams exactly as inference sees them, and which tokens are learned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from mlxlab.data.messages import Text, content_of
from mlxlab.data.records import Record
from mlxlab.data.template import ChatTemplate, Span
from mlxlab.errors import ConfigError, DataError
from mlxlab.interfaces import Example, TokenSequence

SUPERVISE = ("last", "all", "template")


class TooLong(Exception):
    """A row so far beyond `max_tokens` that it is left out without being encoded."""


@dataclass(frozen=True)
class Draft:
    """A sequence before it has tokens.

    Args:
        text: all of it.
        learned: spans of characters that are targets, in order.
        raw: not from a template: gets the beginning and end of sequence of raw text.
        joint: no cut between prompt and response; a token with characters of both is learned.
    """

    text: str
    learned: tuple[Span, ...]
    raw: bool = False
    joint: bool = False

    def prefixes(self) -> list[str]:
        """What has to be encoded: the text up to every place where it is cut, and the whole of it."""
        cuts = [] if self.joint else sorted({cut for span in self.learned for cut in span} - {0, len(self.text)})
        return [*(self.text[:cut] for cut in cuts), self.text]


@dataclass(frozen=True)
class Prepared:
    """A row that waits for its tokens: a draft per branch."""

    source: str
    drafts: Mapping[str, Draft]
    answer: int = 0  # > 0: only this assistant turn of the row, as an example of its own

    def texts(self) -> list[str]:
        return [text for draft in self.drafts.values() for text in draft.prefixes()]


@dataclass(frozen=True)
class Encoder:
    """Turns records into examples: `prepare` finds the texts, `finish` makes sequences of their tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        template: how conversations become text.
        chat: render string prompts as a user turn through the chat template; otherwise they are raw text.
        supervise: "last" (the response), "all" (every assistant turn), "template" (what the template marks).
        max_characters: of a prompt; longer ones raise `TooLong`. Bounds memory, as no token is so long.
        keep: "keep_start" or "keep_end": a longer response or text keeps so many characters there, for the policy to
            cut on; None: it raises `TooLong`.
    """

    tokenizer: Any
    template: ChatTemplate
    chat: bool
    supervise: str = "last"
    max_characters: float = math.inf
    keep: str | None = None
    special: frozenset[int] = field(default=frozenset(), repr=False)
    bos: int | None = None  # that raw text begins with

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        template: str,
        max_tokens: int | None = None,
        supervise: str = "last",
        truncate: str = "keep_end",
        records: str = "completion",
    ) -> Encoder:
        """`template` is "auto" (chat if there is a template), "chat" or "raw"; mlx-lm's wrapper is unwrapped.

        Raises:
            ConfigError: what is asked for needs a chat template, marks in it, or other rows.
        """
        wrapped = type(tokenizer).__name__ == "TokenizerWrapper"
        plain = tokenizer._tokenizer if wrapped else tokenizer
        chat_template = ChatTemplate(tokenizer, plain)
        if template == "chat" and not chat_template.exists:
            raise ConfigError("data.template=chat, but this tokenizer has no chat template; use data.template=raw.")
        chat = chat_template.exists if template == "auto" else template == "chat"
        if supervise != "last" and records != "completion":
            raise ConfigError(
                f"data.supervise={supervise} is for rows with one answer, and this method needs {records} rows, whose "
                "last turns are what is compared; use data.supervise=last."
            )
        if supervise == "template" and not (chat and chat_template.has_marks):
            what = "the one of this tokenizer has no {% generation %} marks" if chat else "there is none here"
            raise ConfigError(
                f"data.supervise=template needs a chat template with marks, and {what}; use data.supervise=last or all."
            )
        # No token has more characters than the longest of the vocabulary; four times that leaves room for tokenizers
        # that compose or drop characters first.
        longest = max(map(len, plain.get_vocab()))
        limit = math.inf if max_tokens is None else 4 * max_tokens * longest
        special = frozenset([*plain.all_special_ids, *plain.added_tokens_decoder])
        bos = plain.bos_token_id
        begins = bos is not None and plain("a")["input_ids"][:1] == [bos]
        keep = truncate if truncate in ("keep_start", "keep_end") else None
        return cls(plain, chat_template, chat, supervise, limit, keep, special, bos if begins else None)

    def __call__(self, record: Record) -> Example:
        """The example of a row that makes one."""
        (prepared,) = self.prepare(record)
        return self.finish(prepared, self.encode(prepared.texts()))

    def encode(self, texts: Sequence[str]) -> dict[str, Any]:
        """Text -> its encoding (`ids`, `offsets`), many at once."""
        texts = list(dict.fromkeys(texts))
        return dict(zip(texts, self.tokenizer(texts, add_special_tokens=False, verbose=False).encodings))

    # -------------------------------------------------------------------------------------------------------- prepare
    def prepare(self, record: Record) -> list[Prepared]:
        """The texts of a row. It is one example, or one for each answer if no text holds all of them (`answers`).

        Raises:
            DataError: the chat template refuses the row or leaves something out.
            TooLong: the row cannot fit, whatever its tokens are.
        """
        record = self._bounded(record)
        if record.prompt is None:
            drafts = {b: Draft(text, ((0, len(text)),), raw=True) for b, text in record.responses.items()}
            return [Prepared(record.source, drafts)]
        if isinstance(record.prompt, str) and not self.chat:
            return [Prepared(record.source, self._raw(record.prompt, record.responses))]
        if not self.template.exists:
            raise DataError(
                f"{record.source}: messages need a chat template, which this tokenizer lacks; give prompt and response "
                "as strings."
            )
        prompt = _turns(record.prompt, "user")
        responses = {branch: _turns(response, "assistant") for branch, response in record.responses.items()}
        if self.supervise == "last":
            if not all(_is_learned(turns[-1]) for turns in responses.values()):
                raise DataError(f"{record.source}: the last answer has weight 0, so there is nothing to learn.")
            return [self._answer(prompt, responses, record)]
        (branch, turns), *_ = responses.items()
        messages = [*prompt, *turns]
        skipped = [message["role"] == "assistant" and not _is_learned(message) for message in messages]
        if self.supervise == "template":
            if any(skipped):
                raise DataError(f"{record.source}: an answer has weight 0, which needs data.supervise=all.")
            text, spans = self.template.marked(messages, record.tools, record.source)
            return [Prepared(record.source, {branch: Draft(text, tuple(spans))})]
        numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and not skipped[n]]
        whole = self.template.answers(messages, numbers, record.tools, record.source)
        if whole is not None:
            return [Prepared(record.source, {branch: Draft(whole[0], tuple(whole[1]))})]
        return [
            replace(self._answer(messages[:number], {branch: [messages[number]]}, record), answer=count)
            for count, number in enumerate(numbers, 1)
        ]

    def _answer(self, prompt: list, responses: Mapping[str, list], record: Record) -> Prepared:
        before, full = self.template.answer(prompt, responses, record.tools, record.source)
        drafts = {branch: Draft(text, ((len(before), len(text)),)) for branch, text in full.items()}
        return Prepared(record.source, drafts)

    def _raw(self, prompt: str, responses: Mapping[str, str]) -> dict[str, Draft]:
        # branches of a pair continue the same tokens, as generation would; a single response is encoded jointly
        return {
            branch: Draft(prompt + response, ((len(prompt), len(prompt + response)),), True, len(responses) == 1)
            for branch, response in responses.items()
        }

    def _bounded(self, record: Record) -> Record:
        """The record with responses that are not much longer than what can be kept of them."""
        if record.prompt is not None and len(content_of(record.prompt)) > self.max_characters:
            raise TooLong
        long = [b for b, response in record.responses.items() if len(content_of(response)) > self.max_characters]
        if not long:
            return record
        # of a pair, a response without its beginning cannot be compared with the other
        if self.keep is None or self.keep == "keep_end" and len(record.responses) > 1:
            raise TooLong
        limit = int(self.max_characters)
        cut = lambda text: text[-limit:] if self.keep == "keep_end" else text[:limit]
        responses = {
            branch: cut(text) if isinstance(text, str) else ({**text[0], "content": cut(text[0]["content"])},)
            for branch, text in record.responses.items()
        }
        return replace(record, responses=responses)

    # --------------------------------------------------------------------------------------------------------- finish
    def finish(self, prepared: Prepared, encoded: Mapping[str, Any]) -> Example:
        """The example, given the encodings of `prepared.texts()`.

        Raises:
            DataError: no token can be learned, or the branches have the same tokens.
        """
        branches = {branch: self._sequence(draft, encoded) for branch, draft in prepared.drafts.items()}
        for branch, sequence in branches.items():
            if not sequence.supervised:
                raise DataError(f"{prepared.source}: no token of the {branch} response can be learned.")
        if len(branches) > 1 and len({sequence.ids.tobytes() for sequence in branches.values()}) == 1:
            raise DataError(
                f"{prepared.source}: {' and '.join(branches)} give the same tokens, so there is nothing to prefer."
            )
        return Example(branches, prepared.source)

    def _sequence(self, draft: Draft, encoded: Mapping[str, Any]) -> TokenSequence:
        ids, learned = (self._joint if draft.joint else self._in_pieces)(draft, lambda text: encoded[text])
        if draft.raw and self.bos is not None and ids[:1] != [self.bos]:
            ids, learned = [self.bos, *ids], [False, *learned]
        end = self.tokenizer.eos_token_id
        closes = draft.raw or self.supervise != "template" and not self._ends(ids, learned)
        if closes and end is not None and ids[-1:] != [end]:
            ids, learned = [*ids, end], [*learned, True]
        return TokenSequence(np.asarray(ids, np.int32), np.asarray(learned, bool))

    def _ends(self, ids: list[int], learned: list[bool]) -> bool:
        """Whether the last answer has a special token at its end, as generation needs one to stop."""
        tail = [token for token, wanted in zip(ids[-8:], learned[-8:]) if wanted]
        return any(token in self.special for token in tail)

    def _joint(self, draft: Draft, encoding: Callable[[str], Any]) -> tuple[list[int], list[bool]]:
        """Joint encoding; the response begins with the first token that has any of its characters."""
        whole, ((start, _),) = encoding(draft.text), draft.learned
        boundary = sum(end <= start for _, end in whole.offsets)
        return list(whole.ids), [False] * boundary + [True] * (len(whole.ids) - boundary)

    def _in_pieces(self, draft: Draft, encoding: Callable[[str], Any]) -> tuple[list[int], list[bool]]:
        """The joint encoding where it begins with the prompt's; otherwise cut where generation would go on."""
        ids: list[int] = []
        learned: list[bool] = []
        done = ""
        for prefix in draft.prefixes():
            whole = encoding(prefix).ids
            ids = list(whole) if whole[: len(ids)] == ids else [*ids, *self._continuation(prefix[len(done) :])]
            wanted = any(start <= len(done) and len(prefix) <= end for start, end in draft.learned)
            learned += [wanted] * (len(ids) - len(learned))
            done = prefix
        return ids, learned

    def _continuation(self, text: str) -> list[int]:
        """Tokens of a text that continues another one; some tokenizers put a space before a text of its own."""
        encode = lambda text: self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        decode = lambda ids: self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for anchor in (*self.tokenizer.all_special_tokens[:1], "\n"):
            front, both = encode(anchor), encode(anchor + text)
            if both[: len(front)] == front and decode(both) == decode(front) + text:
                return both[len(front) :]
        return encode(text)


def _turns(text: Text, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _is_learned(message: Mapping[str, Any]) -> bool:
    """OpenAI's `weight` and the `train` of others switch single turns off."""
    return message.get("weight", 1) != 0 and message.get("train", True) is not False

"""What happens to rows that are longer than `data.max_tokens`. Works on token streams, before any padding."""

from __future__ import annotations

from typing import Mapping

from mlxlab.interfaces import TokenSequence

PROMPT_TOO_LONG = "the prompt alone fills data.max_tokens"
RESPONSE_TOO_LONG = "the response alone fills data.max_tokens"
ROW_TOO_LONG = "they are longer than data.max_tokens"
PROMPT_CUT = "lost the start of their prompt"
TEXT_CUT = "were cut at their end"


class TooLong(Exception):
    """Why a row is left out: one of the sentences above."""


def fit(
    branches: Mapping[str, TokenSequence], max_tokens: int, truncation: str, is_text: bool, bos_id: int | None
) -> tuple[dict[str, TokenSequence], str | None]:
    """The branches of a row, each at most `max_tokens` long, and what was done to them (None: nothing).

    Branches of a pair lose the same tokens of their prompt, as many as the longer one must, so that their prompts stay
    equal. Responses are never cut.

    Args:
        truncation: see `DataConfig`.
        is_text: a row of plain text, whose start is kept.
        bos_id: this token is kept when a stream starts with it.

    Raises:
        TooLong: the row is to be left out.
    """
    excess = max(map(len, branches.values())) - max_tokens
    if excess <= 0:
        return dict(branches), None
    if truncation == "drop":
        raise TooLong(ROW_TOO_LONG)
    if is_text:
        return {name: cut_end(sequence, max_tokens) for name, sequence in branches.items()}, TEXT_CUT
    for sequence in branches.values():
        response = int(sequence.response.sum())
        fixed = int(sequence.ids[0] == bos_id)
        if fixed + 1 + response > max_tokens:  # at least one token of the prompt must stay
            raise TooLong(RESPONSE_TOO_LONG)
        if len(sequence) - response >= max_tokens:
            raise TooLong(PROMPT_TOO_LONG)
    return {name: cut_start(sequence, excess, bos_id) for name, sequence in branches.items()}, PROMPT_CUT


def cut_start(sequence: TokenSequence, count: int, bos_id: int | None = None) -> TokenSequence:
    """Without its first `count` tokens; a leading BOS stays and does not count."""
    start = int(sequence.ids[0] == bos_id)
    keep = [*range(start), *range(start + count, len(sequence))]
    return TokenSequence(sequence.ids[keep], sequence.response[keep])


def cut_end(sequence: TokenSequence, length: int) -> TokenSequence:
    """The first `length` tokens."""
    return TokenSequence(sequence.ids[:length].copy(), sequence.response[:length].copy())

"""What happens to rows that are longer than `max_tokens`: never without a count, never without a target left."""

from __future__ import annotations

import numpy as np

from mlxlab.interfaces import Example, TokenSequence

POLICIES = ("keep_end", "keep_start", "drop", "error")


def truncate(example: Example, max_tokens: int, policy: str, bos: int | None = None) -> Example | None:
    """An example with at most `max_tokens` per branch, or None if the policy does not give one; the same if it fits.

    keep_end: the prompt loses tokens after its beginning of sequence, in all branches the same ones (by the longest
    branch), so that they still share it. A single response that fills the window loses its own beginning. None if the
    prompt alone fills the window, since what is left of it would be another question, and if the responses of a pair
    leave no prompt token, since they could not be compared.

    keep_start: branches lose their ends. None if no target is left, or no difference between branches.

    drop, error: None.
    """
    branches = example.branches.values()
    excess = max(map(len, branches)) - max_tokens
    if excess <= 0:
        return example
    if policy == "keep_start":
        kept = {name: _take(s, np.arange(min(len(s), max_tokens))) for name, s in example.branches.items()}
        return _usable(kept, example)
    if policy != "keep_end":
        return None
    prompt = min(int(sequence.response.argmax()) for sequence in branches)
    first = int(bos is not None and all(sequence.ids[0] == bos for sequence in branches))
    if prompt >= max_tokens:
        return None
    # a prompt token must be left to predict the first response token
    if excess > prompt - first - 1 and len(branches) > 1:
        return None
    kept = {}
    for name, sequence in example.branches.items():
        cut = np.r_[0:first, first + excess : len(sequence)]
        kept[name] = _take(sequence, cut)
    return _usable(kept, example)


def _take(sequence: TokenSequence, index: np.ndarray) -> TokenSequence:
    return TokenSequence(sequence.ids[index], sequence.response[index])


def _usable(branches: dict[str, TokenSequence], example: Example) -> Example | None:
    same = len(branches) > 1 and len({sequence.ids.tobytes() for sequence in branches.values()}) == 1
    if same or not all(sequence.supervised for sequence in branches.values()):
        return None
    return Example(branches, example.source)

"""Errors a user can cause. Each message names what, where, the received value, what is allowed and a remedy."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Iterable

from hydra.errors import CompactHydraException


class MlxlabError(CompactHydraException):
    """Base of all errors that are the user's to mend. Hydra prints its message without a traceback."""


class ConfigError(MlxlabError):
    """A key, a value or a group option is not allowed."""


class CompatError(MlxlabError):
    """Chosen components cannot work together."""


class DataError(MlxlabError):
    """A data file, a row or a template is unusable; the message names file and line."""


class PluginError(MlxlabError):
    """A plugin cannot be loaded or breaks the rules of registration."""


class CheckpointError(MlxlabError):
    """An adapter or checkpoint cannot be read or written."""


class NonFiniteError(MlxlabError):
    """Loss or gradients are NaN or infinite; names the first bad step and tensor."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The tail of an error sentence: what is allowed, and the nearest match when there is one.

    >>> nearest("orpp", ["sft", "orpo"])
    "allowed: orpo, sft; did you mean 'orpo'?"
    """
    options = sorted(map(str, allowed))
    close = get_close_matches(str(word), options, n=1, cutoff=0.5)
    return f"allowed: {', '.join(options) or 'none'}" + (f"; did you mean '{close[0]}'?" if close else "")

"""Can the chosen components work together? Every component says what it cannot do; all of it is reported at once."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from mlxlab import attend
from mlxlab.errors import CompatError
from mlxlab.interfaces import ModelAdapter, Problem, Setup


def problems(setup: Setup) -> list[Problem]:
    """What method, head, backward, layout and (once known) the model object to, in this order, each once."""
    found: list[Problem] = []
    for component in (setup.method, setup.head, setup.backward, setup.layout):
        found += component.check(setup)
    if setup.family is not None and setup.model_config is not None:
        found += setup.family.problems(setup.model_config)
        found += attend.problems(setup.attention, setup.model_config)
    return list(dict.fromkeys(found))


def check(
    setup: Setup, family: type[ModelAdapter] | None = None, model_config: Mapping[str, Any] | None = None
) -> None:
    """Raise a CompatError with a line for each problem.

    Call it before a checkpoint is fetched, and again with `family` and `model_config` (its config.json) afterwards.
    """
    if family is not None:
        setup = dataclasses.replace(setup, family=family, model_config=model_config)
    if found := problems(setup):
        raise CompatError("\n".join(f"{p.sentence.rstrip('.')}; {p.remedy.rstrip('.')}." for p in found))

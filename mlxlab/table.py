"""What is printed after a sweep, and by `mlxlab plugins`."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxlab.metrics import number
from mlxlab.registry import Registry
from mlxlab.rundir import COMPLETED, FAILED


@dataclass(frozen=True)
class Job:
    """One run of a sweep: how it ended, and the error if it failed."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    state: str
    error: str | None = None

    def metrics(self) -> Mapping[str, Any]:
        """What metrics.json says; empty if the run did not get so far."""
        if self.state != COMPLETED:
            return {}
        return json.loads((self.folder / "metrics.json").read_text(encoding="utf-8"))


def print_jobs(jobs: Sequence[Job]) -> None:
    """One row per job, best validation loss first, failed jobs last with their error."""
    table = Table("job", "overrides", "status", "best loss", "accuracy", "margin", "tokens/s", "peak GB", "folder")
    for column in table.columns[3:8]:
        column.justify, column.no_wrap = "right", True
    for job in sorted(jobs, key=_rank):
        metrics = job.metrics()
        validation = metrics.get("final", {}).get("val", {})
        values = [
            metrics.get("best_loss"),
            validation.get("accuracy"),
            metrics.get("best_margin"),
            metrics.get("tokens_per_second"),
            metrics.get("peak_gb"),
        ]
        state = f"{job.state}: {job.error}" if job.state == FAILED else job.state
        shown = ["" if value is None else number(value) for value in values]
        folder = job.folder.relative_to(Path.cwd()) if job.folder.is_relative_to(Path.cwd()) else job.folder
        cells = [str(job.number), " ".join(job.overrides), state, *shown, str(folder)]
        table.add_row(*[Text(cell, overflow="fold") for cell in cells])
    console().print(table)


def print_plugins(registry: Registry) -> None:
    """Components with their providers, then the plugins that were not loaded."""
    table = Table("axis", "name", "provider", "version")
    for axis, name, _, provider in registry.entries():
        table.add_row(*[Text(cell) for cell in (axis, name, provider.name, provider.version)])
    console().print(table)
    for failure in registry.failures:
        console().print(Text(failure))


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for whole paths in a file or pipe."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)


def _rank(job: Job) -> tuple:
    loss = job.metrics().get("best_loss")
    return (job.state != COMPLETED, math.inf if loss is None else loss, job.number)

"""Where numbers go: metrics.jsonl (one object a line), metrics.json (the summary) and the console."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Callable, Mapping

import mlx.core as mx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mlxlab.errors import ConfigError, nearest


class MetricsLog:
    """Appends records to `metrics.jsonl`, each complete on disk before the call returns, and hands them to observers.

    Fields: `kind` ("meta" first, then "train", "val", "sample", "event"), `time` (seconds since the epoch), `step`,
    and what the record is about. Losses and metrics are floats; `peak_gb` and `active_gb` are in units of 1e9 bytes.
    """

    def __init__(self, folder: Path, observe: Callable[[dict[str, Any]], None] = lambda record: None):
        self.path, self._observe = folder / "metrics.jsonl", observe

    def write(self, kind: str, **fields: Any) -> None:
        record = {"kind": kind, "time": round(time.time(), 3), **fields}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._observe(record)


class Window:
    """Averages over the steps since the last report, and tokens per second of training time only."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = self._tokens = self._supervised = 0
        self._seconds = 0.0

    def add(self, values: Mapping[str, float], tokens: int, supervised: int, seconds: float) -> None:
        """One update: its values, real tokens of its sequences, scored response tokens, and seconds it took."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        self._tokens, self._supervised = self._tokens + tokens, self._supervised + supervised
        self._seconds += seconds

    @property
    def state(self) -> dict[str, Any]:
        """What was added since the last report, as plain values; may be set to continue a run."""
        return {
            "sums": dict(self._sums),
            "steps": self._steps,
            "tokens": self._tokens,
            "supervised": self._supervised,
            "seconds": self._seconds,
        }

    @state.setter
    def state(self, value: Mapping[str, Any]) -> None:
        self._sums, self._steps, self._seconds = dict(value["sums"]), value["steps"], value["seconds"]
        self._tokens, self._supervised = value["tokens"], value["supervised"]

    def report(self) -> dict[str, float]:
        """Means of the window, `tokens_per_second` and `supervised_tokens_per_second`; starts a new window."""
        means = {name: value / self._steps for name, value in self._sums.items()}
        seconds = max(self._seconds, 1e-9)
        means["tokens_per_second"] = round(self._tokens / seconds, 1)
        means["supervised_tokens_per_second"] = round(self._supervised / seconds, 1)
        self.reset()
        return means


def more_is_better(metric: str) -> bool:
    """The direction of a validation metric, by its name: losses and everything unknown should be small."""
    return metric.startswith(("accuracy", "margin", "reward", "logp")) and not metric.endswith("rejected")


class Best:
    """The best validation so far, and whether it is time to stop.

    Args:
        metric: name of the metric that decides.
        patience: validations in a row without a better value after which `exhausted` is true; 0: never.

    `state` holds plain values: the metric's best `value`, its `step`, validations `since` then, and over all
    validations the lowest `loss` and the highest `margin`.
    """

    def __init__(self, metric: str = "loss", patience: int = 0):
        self.metric, self._patience = metric, patience
        self.state: dict[str, Any] = {"value": None, "step": None, "since": 0, "loss": None, "margin": None}

    def update(self, step: int, record: Mapping[str, float]) -> bool:
        """Take note of a validation; True if it is the best so far.

        Raises:
            ConfigError: it has no such metric.
        """
        if self.metric not in record:
            raise ConfigError(f"train.best_metric={self.metric} is not measured; {nearest(self.metric, record)}")
        state = self.state = dict(self.state)
        for name, choose in (("loss", min), ("margin", max)):
            if name in record:
                state[name] = record[name] if state[name] is None else choose(state[name], record[name])
        value, best = record[self.metric], state["value"]
        better = best is None or (value > best if more_is_better(self.metric) else value < best)
        state.update({"value": value, "step": step, "since": 0} if better else {"since": state["since"] + 1})
        return better

    def forget(self) -> None:
        """The next validation will be the best; patience goes on."""
        self.state = {**self.state, "value": None, "step": None}

    @property
    def exhausted(self) -> bool:
        return 0 < self._patience <= self.state["since"]


def memory() -> dict[str, float]:
    """Peak since the run began and memory in use now, in units of 1e9 bytes."""
    return {
        "peak_gb": round(mx.get_peak_memory() / 1e9, 3),
        "active_gb": round(mx.get_active_memory() / 1e9, 3),
    }


class Reporter:
    """Progress on the console: a bar on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, total: int, done: int = 0):
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        interactive = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True) if interactive else None
        self._task = self._progress.add_task("training", total=total, completed=done) if interactive else None

    def __enter__(self) -> Reporter:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self) -> None:
        if self._progress:
            self._progress.advance(self._task)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()

    def values(self, label: str, step: int, total: int, fields: Mapping[str, float]) -> None:
        """One line of numbers, such as `train 10/100  loss 1.234  accuracy 0.75`."""
        shown = "  ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in fields.items())
        self.line(f"{label:<5} {step:>{len(str(total))}}/{total}  {shown}")


def number(value: float) -> str:
    """Four significant digits, no padding."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"

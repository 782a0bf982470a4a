"""Continue a run from one of its checkpoints, as if it had not stopped: `train.resume=...`.

The run that continues has a folder of its own, so nothing of the earlier one is overwritten; run.json names the
checkpoint. A checkpoint holds the adapter, the moments of the optimizer, and in progress.json the update, the position
in the data, the sums of the current report, the best validation so far, and the configuration. Dropout needs nothing,
since its keys come from seed and update.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import mlx.core as mx

from mlxlab.adapters import CONFIG
from mlxlab.data import Batches
from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.lora import Lora, load_adapter_weights
from mlxlab.metrics import Best, Window
from mlxlab.optim import Optimizer
from mlxlab.rundir import RunFolder, find_checkpoints, find_runs

LATEST = "latest"
# May differ from the run that is continued: how long, what is reported, how the same numbers are computed, and the
# optimizer's options, which a user may want to change half-way. Everything else would make it another run.
CHANGEABLE = (
    *("train.", "optim.", "memory.", "head.", "attention"),
    *("model.dtype", "model.linear", "output_dir", "data.path"),
)
# Exceptions to that: what an update consists of, and what `best` compares.
FIXED = ("train.batch_size", "train.batch_tokens", "train.accumulate", "train.best_metric")
# What progress.json has.
KEYS = ("step", "updates", "data", "rows", "window", "best", "config")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and the content of its progress.json."""

    folder: Path
    progress: Mapping[str, Any]

    @classmethod
    def find(cls, where: str, output_dir: str) -> Checkpoint:
        """The checkpoint that `train.resume` means.

        Args:
            where: a run folder, a checkpoint folder, or "latest".
            output_dir: where the latest run is looked for.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        if where == LATEST:
            found = [path for run in find_runs(output_dir) for path in find_checkpoints(run)[-1:]]
            place = f"no run in {Path(output_dir).absolute()} has a checkpoint"
        else:
            given = Path(where).expanduser()
            found = [given] if (given / "progress.json").is_file() else find_checkpoints(given)
            place = f"{given.absolute()} is neither a checkpoint nor a run that has one"
        if not found:
            raise CheckpointError(
                f"train.resume={where}: {place}; give outputs/.../checkpoints/step-..., or a run that was made with "
                "train.checkpoint_every."
            )
        folder = found[-1]
        try:
            progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
            if missing := [key for key in KEYS if key not in progress]:
                raise ValueError(f"it has no {missing[0]!r}")
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"train.resume={where}: {folder / 'progress.json'} cannot be used ({error}); take another checkpoint."
            ) from error
        return cls(folder, progress)

    @property
    def step(self) -> int:
        """Updates that have been made."""
        return self.progress["step"]

    def check(self, resolved: Mapping[str, Any]) -> list[str]:
        """What is changed in the new configuration, as "key: old -> new".

        Raises:
            ConfigError: options differ that make it another run; one line for each.
        """
        old, new = _flat(self.progress["config"]), _flat(resolved)
        changed = {key: value for key, value in new.items() if key in old and old[key] != value}
        problems = [
            f"{key}={_text(value)} differs from the run that is continued ({key}={_text(old[key])} in {self.folder}); "
            "give the same value, or start anew with lora.warm_start"
            for key, value in changed.items()
            if not _may_change(key, value)
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        quiet = ("train.resume", "lora.warm_start", "output_dir")
        return [f"{key}: {_text(old[key])} -> {_text(v)}" for key, v in changed.items() if key not in quiet]

    def restore(self, lora: Lora, optimizer: Optimizer, batches: Batches, window: Window, best: Best) -> None:
        """Put everything back to where it was.

        Raises:
            ConfigError: other rows, or nothing is left to do.
            CheckpointError: files that do not fit or cannot be read.
        """
        if batches.fingerprint != self.progress["rows"]:
            raise ConfigError(
                f"data.path: these are not the rows that {self.folder} was trained on (their number or lengths "
                "differ); give the same data, or start anew with lora.warm_start."
            )
        if self.step >= optimizer.total:
            raise ConfigError(
                f"train.resume: {self.folder} is after update {self.step}, and this run ends after {optimizer.total}; "
                f"give train.iters > {self.step}, or more train.epochs."
            )
        load_adapter_weights(lora, self.folder, "train.resume")
        path = self.folder / "optimizer.safetensors"
        try:
            state = mx.load(str(path))
            mx.eval(state)  # now: the file may be gone later
        except RuntimeError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); take another checkpoint.") from error
        optimizer.load_state(state)
        batches.position = self.progress["data"]
        window.state = self.progress["window"]
        best.state = self.progress["best"]

    def keep_best(self, folder: RunFolder, best: Best) -> None:
        """Copy best/ of the earlier run into the new one, or forget its value if that run went on to a better one."""
        if not best.state["step"]:
            return
        source = self.folder.parent.parent / "best"
        try:
            config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
            step = config["mlxlab"]["best"]["step"]
        except (OSError, ValueError, KeyError, TypeError):
            step = None
        if step == best.state["step"]:
            folder.save("best", lambda path: shutil.copytree(source, path, dirs_exist_ok=True), step)
        else:
            best.forget()


def _may_change(key: str, value: Any) -> bool:
    if key == "lora.warm_start":  # was read when the first run began
        return value is None
    return key.startswith(CHANGEABLE) and key not in FIXED


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _text(value: Any) -> str:
    return "null" if value is None else str(value)

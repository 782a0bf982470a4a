"""The folder of one run: never shared, every file complete or absent.

status.json    state (RUNNING, COMPLETED, FAILED, INTERRUPTED), times, error, best values
config.yaml    the complete configuration, as plain values
run.json       versions, machine, commit of the code, command line, plan
adapter/, best/, checkpoints/, metrics.jsonl, metrics.json    written by the training loop
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import mlx.core as mx
from omegaconf import DictConfig, OmegaConf

from mlxlab import __version__
from mlxlab.discovery import notify
from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.registry import Registry

RUNNING, COMPLETED, FAILED, INTERRUPTED = "RUNNING", "COMPLETED", "FAILED", "INTERRUPTED"


class RunFolder:
    """Takes possession of a folder.

    Args:
        path: the folder; made if it does not exist.
        registry: components and observers of this process.
        overrides: the command line, for run.json.

    Raises:
        ConfigError: the folder already holds a run, even one that started at the same moment.
    """

    def __init__(self, path: Path | str, registry: Registry, overrides: Sequence[str] = ()):
        self.path = Path(path).absolute()
        self.registry, self.overrides = registry, list(overrides)
        self.config: Mapping[str, Any] = {}
        self._step: int | None = None
        self._started = False
        self._status: dict[str, Any] = {"state": RUNNING, "started": _now()}
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # exclusive creation decides between two runs that start together
            with open(self.path / "status.json", "x", encoding="utf-8") as file:
                file.write(_json(self._status))
        except FileExistsError:
            raise ConfigError(
                f"the folder {self.path} already holds a run (status.json); give another hydra.run.dir, or remove the "
                "folder if you do not need it."
            ) from None

    def configure(self, resolved: Mapping[str, Any]) -> None:
        """Keep the complete configuration."""
        self.config = dict(resolved)
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(self.config)))

    def keep_hydra(self, composed: DictConfig, settings: DictConfig) -> None:
        """Write .hydra/ as Hydra would, but only once this run owns the folder: Hydra writes into a taken one, too."""
        hydra = self.path / ".hydra"
        hydra.mkdir()
        write_text(hydra / "config.yaml", OmegaConf.to_yaml(composed))
        write_text(hydra / "hydra.yaml", OmegaConf.to_yaml(OmegaConf.create({"hydra": settings})))
        write_text(hydra / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(self.overrides)))

    def start(self, plan: Mapping[str, Any]) -> None:
        """Write run.json and tell observers that the run begins."""
        facts = {
            "command": ["mlxlab", *self.overrides],
            "working_directory": os.getcwd(),
            "versions": _versions(),
            "plugins": [" ".join(filter(None, provider)) for provider in self.registry.plugins],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": {"default": str(mx.default_device()), **mx.device_info()},
            "code": code_state(),
            "plan": plan,
        }
        write_json(self.path / "run.json", facts)
        self._started = True
        notify(self.registry, "mlxlab_run_started", run_dir=self.path, config=self.config, plan=dict(plan))

    def observe(self, record: Mapping[str, Any]) -> None:
        """Hand a record of metrics.jsonl to observers."""
        self._step = record.get("step", self._step)
        notify(self.registry, "mlxlab_record", run_dir=self.path, record=dict(record))

    def save(self, name: str, write: Callable[[Path], None], step: int | None = None) -> Path:
        """The folder `name` with what `write(folder)` puts there; an older one of this name is replaced.

        Until everything is written the older one stays; if writing fails it is left as it was.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            write(temporary)
            os.chmod(temporary, 0o777 & ~_umask())
            _replace_folder(temporary, target)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(self.path).free
            raise CheckpointError(
                f"{target} cannot be written ({' '.join(str(error).split())}; {free / 1e6:.1f} MB free on that disk); "
                "what was there before is unchanged."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        step = self._step if step is None else step
        notify(self.registry, "mlxlab_checkpoint_saved", run_dir=self.path, path=target, step=step)
        return target

    def finish(self, state: str, error: str | None = None, **values: Any) -> None:
        """Write the final status.json (best_loss, best_margin, ... are in `values`) and tell observers."""
        self._status.update(state=state, ended=_now(), **values)
        if error is not None:
            self._status["error"] = error
        write_json(self.path / "status.json", self._status)
        if self._started:
            notify(self.registry, "mlxlab_run_finished", run_dir=self.path, status=dict(self._status))


def find_runs(output_dir: str | Path) -> list[Path]:
    """Folders of the runs below a folder, in the order in which they started."""
    found = []
    for path in Path(output_dir).expanduser().rglob("status.json"):
        try:
            found.append((json.loads(path.read_text(encoding="utf-8"))["started"], path.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not the file of a run
    return [folder for _, folder in sorted(found)]


def find_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, earliest update first."""
    found = [path.parent for path in run.glob("checkpoints/step-*/progress.json")]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def write_text(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new one, never half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file like `write_text`; NaN and infinity become text."""
    write_text(path, _json(content))


def code_state() -> dict[str, Any] | None:
    """Commit of the checkout that mlxlab is imported from and whether it has uncommitted changes; None elsewhere."""
    folder = Path(__file__).resolve().parent
    # a package that git does not track lies in somebody else's checkout, in an environment for example
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changes = _git(folder, "status", "--porcelain")
    return {"commit": _git(folder, "rev-parse", "HEAD"), "uncommitted_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _replace_folder(new: Path, target: Path) -> None:
    """Folders cannot be replaced in one step where one exists: the older one steps aside first."""
    if not target.exists():
        os.rename(new, target)
        return
    older = new.with_name(new.name + "-old")
    os.rename(target, older)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(older, target)
        raise
    shutil.rmtree(older)


def _versions() -> dict[str, str]:
    packages = ("mlx", "mlx-lm", "hydra-core", "omegaconf", "pluggy", "transformers", "safetensors", "numpy")
    return {"mlxlab": __version__, **{name: metadata.version(name) for name in packages}}


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value

"""A folder for models that are made or converted on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Callable

from filelock import FileLock

_COMPLETE = ".complete"


def cache_folder() -> Path:
    """`MLXLAB_CACHE`, else `XDG_CACHE_HOME/mlxlab`, else `~/.cache/mlxlab`."""
    if explicit := os.environ.get("MLXLAB_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlxlab"


def build_once(
    name: str,
    build: Callable[[Path], None],
    valid: Callable[[Path], bool] = lambda folder: True,
    group: str = "models",
) -> Path:
    """The folder `<group>/<name>` in the cache, made by `build(temporary folder)` if it is not there yet.

    Atomic (renamed when complete) and safe when two processes start together: the second waits for the first.
    A folder that is incomplete or not `valid` is made again.
    """
    folder = cache_folder() / group / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(name + ".lock")):
        if (folder / _COMPLETE).exists():
            if valid(folder):
                return folder
            print(f"{folder} is damaged; making it again")
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
        try:
            build(temporary)
            (temporary / _COMPLETE).touch()
            temporary.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder

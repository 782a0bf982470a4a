"""Fixtures for the command line: an empty working directory, fresh process-wide state, an instant training loop."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from mlxlab import discovery
from mlxlab.cli import main

TINY = "model=tiny_llama"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder as working directory, and process-wide state of plugins and Hydra as at the start."""
    for name in ("MLXLAB_PLUGINS_DIR", "MLXLAB_BLOCK", "MLXLAB_STRICT_PLUGINS", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discovery, "_loaded", None)
    installed = importlib.metadata.entry_points
    # plugins that a test installs, and none that happen to be in this environment
    ours = lambda point: Path(str(point.dist.locate_file(""))).is_relative_to(tmp_path)
    found = lambda **group: [point for point in installed(**group) if ours(point)]
    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.chdir(tmp_path)
    handlers = logging.getLogger().handlers[:]
    yield tmp_path
    logging.getLogger().handlers[:] = handlers  # Hydra puts its own there
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@dataclass
class Program:
    """Calls the program in this process with a training loop that only records what it was asked to do."""

    capture: Any
    configs: list = field(default_factory=list)
    behave: Callable = lambda config: None  # may raise, or return what to add to the summary

    def __call__(self, *arguments: str) -> Outcome:
        self.capture.readouterr()
        code = main(arguments)
        captured = self.capture.readouterr()
        return Outcome(code, captured.out, captured.err)

    def train(self, config, folder) -> dict[str, Any]:
        self.configs.append(config)
        folder.start({"updates": 1})
        summary = {"best_loss": 1.0 + config.seed, "best_margin": 0.25, "tokens_per_second": 7.0, "peak_gb": 0.5}
        summary = {**summary, "final": {"val": {"accuracy": 0.75}}, **(self.behave(config) or {})}
        (folder.path / "metrics.json").write_text(json.dumps(summary), encoding="utf-8")
        return summary


@pytest.fixture
def program(elsewhere, monkeypatch, capsys) -> Program:
    program = Program(capsys)
    monkeypatch.setitem(sys.modules, "mlxlab.train", types.SimpleNamespace(run=program.train))
    return program


def runs(folder: Path) -> list[Path]:
    """Run folders below a folder, oldest first."""
    return sorted(path.parent for path in folder.rglob("status.json"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def rows_of(table: str) -> list[list[str]]:
    """Cells of a table that was printed."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def interrupt(config) -> None:
    raise KeyboardInterrupt

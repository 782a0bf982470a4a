"""A run folder has one owner, and its files are complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import read

from mlxlab.errors import CheckpointError, ConfigError
from mlxlab.registry import Registry
from mlxlab.rundir import COMPLETED, RUNNING, RunFolder, code_state, write_text


class Hooks:
    """Stands for pluggy's relay: remembers every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        hooks = self

        class Caller:
            @staticmethod
            def get_hookimpls():
                return [Implementation(hooks, name)]

        return Caller


class Implementation:
    plugin_name = "test"
    argnames = ()

    def __init__(self, hooks, name):
        arguments = {"mlxlab_checkpoint_saved": ("path", "step"), "mlxlab_run_finished": ("status",)}
        self.argnames = arguments.get(name, ())
        self.function = lambda **values: hooks.calls.append((name, values))


@pytest.fixture
def registry():
    registry = Registry()
    registry.hooks = Hooks()
    return registry


def test_status(tmp_path, registry):
    folder = RunFolder(tmp_path / "a" / "b", registry)
    assert read(folder.path / "status.json")["state"] == RUNNING
    folder.start({"x": float("nan"), "path": Path("p")})
    assert read(folder.path / "run.json")["plan"] == {"x": "nan", "path": "p"}
    folder.finish(COMPLETED, best_loss=float("inf"))
    status = json.loads((folder.path / "status.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (status["state"], status["best_loss"]) == (COMPLETED, "inf")
    assert [name for name, _ in registry.hooks.calls] == ["mlxlab_run_started", "mlxlab_run_finished"]


def test_a_folder_has_one_owner(tmp_path, registry):
    RunFolder(tmp_path / "run", registry).finish(COMPLETED)
    before = (tmp_path / "run" / "status.json").read_bytes()
    with pytest.raises(ConfigError, match=r"run already holds a run \(status.json\); give another hydra.run.dir"):
        RunFolder(tmp_path / "run", registry)
    assert (tmp_path / "run" / "status.json").read_bytes() == before


def test_save_replaces_as_a_whole(tmp_path, registry):
    folder = RunFolder(tmp_path, registry)
    folder.observe({"step": 4})
    folder.save("best", lambda path: (path / "a.txt").write_text("old", encoding="utf-8"))
    folder.save("best", lambda path: (path / "b.txt").write_text("new", encoding="utf-8"), step=5)
    folder.save("checkpoints/step-00005", lambda path: (path / "c.txt").write_text("x", encoding="utf-8"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.suffix == ".txt") == [
        "best/b.txt",
        "checkpoints/step-00005/c.txt",
    ]
    saved = [values for name, values in registry.hooks.calls if name == "mlxlab_checkpoint_saved"]
    assert [(values["path"].name, values["step"]) for values in saved] == [("best", 4), ("best", 5), ("step-00005", 4)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "best").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("[save] failed")])
def test_a_save_that_fails_changes_nothing(tmp_path, registry, error):
    folder = RunFolder(tmp_path, registry)
    folder.save("best", lambda path: (path / "a.txt").write_text("old", encoding="utf-8"))

    def write(path):
        (path / "a.txt").write_text("half", encoding="utf-8")
        raise error

    with pytest.raises(CheckpointError, match=r"best cannot be written .*; what was there before is unchanged"):
        folder.save("best", write)
    assert (tmp_path / "best" / "a.txt").read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "status.json"]


def test_write_text_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_text(path, "new ü")
    assert path.read_text(encoding="utf-8") == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_code_state_is_none_or_a_commit():
    state = code_state()
    assert state is None or set(state) == {"commit", "uncommitted_changes"}

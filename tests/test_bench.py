"""`python -m mlxlab bench`: its grid, its cells, its peers, what it writes, and that nothing it starts survives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mlxlab.bench import _cells, _split, main, peers
from mlxlab.bench.cell import run_cell
from mlxlab.errors import ConfigError

TINY = ["model=tiny_llama", "optim.warmup=0"]


def cells(*arguments: str):
    return _cells(*_split([*TINY, *arguments]))


def test_grid_has_peers_first_and_every_combination_of_lists():
    grid = cells(
        "method=sft", "memory=none,[segmented,prefix_shared]", "head=naive,flash", "length=8,16", "peers=mlx_lm"
    )
    assert [cell["length"] for cell in grid] == [8] * 5 + [16] * 5
    assert [cell["peer"] for cell in grid[:5]] == ["mlx_lm", None, None, None, None]
    assert {tuple(cell["overrides"][3:]) for cell in grid[1:5]} == {
        (f"memory={memory}", f"head={head}")
        for memory in ("none", "[segmented,prefix_shared]")
        for head in ("naive", "flash")
    }


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("length=3", "length must be integers >= 4, got '3'"),
        ("prompt=255", "prompt=255 must leave 2 of length=256"),
        ("repeats=0", "repeats must be an integer >= 1"),
        ("peers=mlx_ln", "mlx_ln is not known.*mlx_lm"),
        ("head=flush", "head=flush does not exist.*flash"),
        ("method", "not of the form key=value"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_cell(argument, says):
    with pytest.raises(ConfigError, match=says):
        cells(argument)


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install mlx-lm-lora"):
        peers.check("mlx_lm_lora", "orpo")


def test_a_peer_without_a_counterpart_of_the_method_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match="no counterpart of method=sft; choose orpo or dpo"):
        peers.check("mlx_lm_lora", "sft")


@pytest.mark.parametrize("scope", ["full", "response"])
def test_a_peer_computes_the_loss_of_the_same_tokens(scope):
    overrides = [*TINY, "method=sft", f"method.scope={scope}", "memory=segmented", "head=flash"]
    cell = {"overrides": overrides, "length": 24, "prompt": 10, "rows": 2, "repeats": 1}
    ours, theirs = (run_cell({**cell, "peer": peer}) for peer in (None, "mlx_lm"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["tokens_per_second"] > 0 and theirs["peak_gb"] > 0


def test_output_holds_machine_and_cells(tmp_path, capsys):
    assert main([*TINY, "method=sft", "length=8", "repeats=1", f"output={tmp_path}"]) == 0
    written = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert "MLX" in written["machine"] and written["cells"][0]["loss"] > 0
    assert "tokens/s" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_a_cell_over_its_limit_is_given_up_and_the_others_go_on(capsys):
    assert main([*TINY, "method=sft", "length=8", "repeats=100000", "limit=3"]) == 1
    assert "not finished after 3 s" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_no_cell_survives_the_bench(ending):
    command = [sys.executable, "-m", "mlxlab", "bench", *TINY, "method=sft", "length=8", "repeats=1000000"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children: list[int] = []
    for _ in range(300):
        children = [int(pid) for pid in _children(bench.pid)]
        if children:
            break
        time.sleep(0.1)
    assert children
    bench.send_signal(ending)
    bench.wait()
    for _ in range(100):
        if not any(_alive(pid) for pid in children):
            return
        time.sleep(0.1)
    pytest.fail(f"cells {children} still run")


def _children(pid: int) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")

"""Several runs from one command: order, failures, the table at the end, and experiment files."""

from __future__ import annotations

import pytest
from conftest import TINY, interrupt, read, rows_of, runs

from mlxlab.errors import CompatError
from mlxlab.publish import CONF
from mlxlab.rundir import COMPLETED, FAILED, INTERRUPTED


def test_a_sweep_ends_with_a_table_best_first(program, elsewhere):
    outcome = program(TINY, "seed=2,0,1", "-m", "optim.learning_rate=1e-5")
    assert outcome.code == 0
    assert [config.optim.learning_rate for config in program.configs] == [1e-5] * 3
    rows = rows_of(outcome.out)
    assert [row[0] for row in rows] == ["1", "2", "0"]
    assert rows[0][1:8] == [f"{TINY} seed=0 optim.learning_rate=1e-05", COMPLETED, "1", "0.75", "0.25", "7", "0.5"]
    assert {str(folder.relative_to(elsewhere)) for folder in runs(elsewhere)} == {row[8] for row in rows}


def test_numbers_of_a_sweep_stay_numbers(program):
    assert program(TINY, "-m", "optim.learning_rate=1e-5,3e-5").code == 0
    assert [config.optim.learning_rate for config in program.configs] == [1e-5, 3e-5]


def test_failed_jobs_are_all_named_and_the_others_run(program, elsewhere):
    def behave(config):
        if config.seed == 0:
            raise CompatError("the first does not fit; change it.")
        if config.seed == 2:
            raise RuntimeError("the third broke")

    program.behave = behave
    outcome = program(TINY, "-m", "seed=0,1,2,3")
    assert outcome.code == 1
    rows = rows_of(outcome.out)
    assert [row[0] for row in rows if row[0]] == ["1", "3", "0", "2"]
    text = " ".join(" ".join(row) for row in rows)
    assert "FAILED: the first does not fit; change it." in text and "FAILED: RuntimeError: the third broke" in text
    states = [read(folder / "status.json")["state"] for folder in runs(elsewhere)]
    assert sorted(states) == [COMPLETED, COMPLETED, FAILED, FAILED]
    assert "the first does not fit" in outcome.err and "the third broke" in outcome.err


def test_ctrl_c_in_a_sweep_shows_what_there_is(program, elsewhere):
    program.behave = lambda config: interrupt(config) if config.seed == 1 else None
    outcome = program(TINY, "-m", "seed=0,1,2")
    assert outcome.code == 130 and len(program.configs) == 2
    assert [row[2].split(":")[0] for row in rows_of(outcome.out)] == [COMPLETED, INTERRUPTED]


def test_lists_of_memory_options_in_a_sweep(program):
    assert program(TINY, "-m", "memory=none,[segmented,prefix_shared]").code == 0
    assert [config.resolved["memory"]["layout"] for config in program.configs] == ["separate", "prefix_shared"]


def test_a_sweep_in_a_file(program, elsewhere):
    outcome = program(TINY, "experiment=heads_sweep")
    assert outcome.code == 0
    assert [config.resolved["head"]["name"] for config in program.configs] == ["naive", "chunked", "fused", "flash"]
    assert len(rows_of(outcome.out)) == 4


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "experiment").glob("*.yaml")))
def test_experiments(program, name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n#\n# ") and f"python -m mlxlab experiment={name}" in text
    assert program(TINY, f"experiment={name}").code == 0


def test_the_command_line_beats_an_experiment(program):
    assert program(TINY, "experiment=long_context_orpo", "head=naive", "data.max_tokens=64").code == 0
    config = program.configs[0]
    assert config.resolved["head"]["name"] == "naive" and config.data.max_tokens == 64
    assert config.resolved["memory"]["backward"] == "segmented" and config.train.batch_size == 1

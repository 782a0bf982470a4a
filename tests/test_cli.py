"""The command line as a whole: runs, sweeps, errors, exit codes, folders, plugins. Training itself is instant."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import TINY, interrupt, read, rows_of, runs
from omegaconf import OmegaConf

import mlxlab
from mlxlab.errors import CompatError
from mlxlab.publish import CONF
from mlxlab.rundir import COMPLETED, FAILED, INTERRUPTED

ROOT = Path(mlxlab.__file__).resolve().parent.parent


def start(*arguments: str, folder: Path, **environment: str) -> subprocess.Popen:
    """The program in a process of its own."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "mlxlab", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


# -------------------------------------------------------------------------------------------------------- single runs
def test_a_run(program, elsewhere):
    outcome = program(TINY, "seed=3", "output_dir=results", "optim.learning_rate=1e-5")
    assert outcome.code == 0, outcome.err
    [config] = program.configs
    assert config.seed == 3 and config.optim.learning_rate == 1e-5
    [folder] = runs(elsewhere / "results")
    assert outcome.out.splitlines()[-1] == f"run folder: {folder} ({COMPLETED})"
    status = read(folder / "status.json")
    assert (status["state"], status["best_loss"], status["best_margin"]) == (COMPLETED, 4.0, 0.25)
    assert status["started"] <= status["ended"] and "error" not in status
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config.resolved
    facts = read(folder / "run.json")
    assert facts["command"] == ["mlxlab", TINY, "seed=3", "output_dir=results", "optim.learning_rate=1e-5"]
    assert set(facts["versions"]) >= {"mlxlab", "mlx", "mlx-lm", "hydra-core"} and facts["plan"] == {"updates": 1}
    assert sorted(path.name for path in folder.iterdir()) == [
        ".hydra",
        "config.yaml",
        "metrics.json",
        "run.json",
        "status.json",
    ]


def test_flags_may_stand_anywhere(program, elsewhere):
    assert program(TINY, "-m", "seed=1,2").code == 0
    assert [config.seed for config in program.configs] == [1, 2]


@pytest.mark.parametrize("arguments", [["seed=0"], []])
def test_seed_zero_is_a_seed(program, arguments):
    assert program(TINY, *arguments).code == 0
    assert program.configs[0].seed == 0 and program.configs[0].resolved["seed"] == 0


def test_paths_are_relative_to_the_start_in_any_case(program, elsewhere):
    seen = []
    program.behave = lambda config: seen.append((os.getcwd(), config.data.path))
    for extra in ([], ["hydra.job.chdir=true"], ["-m", "hydra.job.chdir=true"]):
        assert program(TINY, "data=jsonl", "data.path=./rows", *extra).code == 0
    assert seen == [(str(elsewhere), "./rows")] * 3
    assert Path.cwd() == elsewhere and len(runs(elsewhere / "outputs")) == 3


def test_values_of_hydra_can_be_used(program, elsewhere):
    assert program(TINY, "data=jsonl", "data.path=${hydra:runtime.cwd}/rows").code == 0
    assert program.configs[0].data.path == f"{elsewhere}/rows"


# ------------------------------------------------------------------------------------------------------------ failure
def test_a_user_error_is_shown_without_traceback(program, elsewhere):
    def behave(config):
        raise CompatError("this and that; do something else.")

    program.behave = behave
    outcome = program(TINY)
    assert outcome.code == 1
    assert outcome.err.splitlines()[0] == "this and that; do something else." and "Traceback" not in outcome.err
    [folder] = runs(elsewhere)
    status = read(folder / "status.json")
    assert (status["state"], status["error"]) == (FAILED, "this and that; do something else.")


def test_another_error_is_shown_with_its_place(program, elsewhere):
    program.behave = lambda config: 1 / 0
    outcome = program(TINY)
    assert outcome.code == 1 and outcome.err.count("ZeroDivisionError") == 1 and "test_cli.py" in outcome.err
    assert read(runs(elsewhere)[0] / "status.json")["error"] == "ZeroDivisionError: division by zero"


def test_a_call_of_exit_is_a_failure(program, elsewhere):
    program.behave = lambda config: sys.exit(0)
    assert program(TINY).code == 1
    assert "ended by a call of exit(0)" in read(runs(elsewhere)[0] / "status.json")["error"]


def test_ctrl_c(program, elsewhere):
    program.behave = interrupt
    outcome = program(TINY)
    assert outcome.code == 130 and "Traceback" not in outcome.err
    assert read(runs(elsewhere)[0] / "status.json")["state"] == INTERRUPTED


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_the_objective_is_finite_or_the_run_has_failed(program, elsewhere, loss):
    program.behave = lambda config: {"best_loss": loss}
    outcome = program(TINY)
    assert outcome.code == 1 and f"the best validation loss is {loss}" in outcome.err
    assert read(runs(elsewhere)[0] / "status.json")["state"] == FAILED


def test_a_run_without_validation_is_no_failure(program):
    program.behave = lambda config: {"best_loss": None}
    assert program(TINY).code == 0


def test_mistakes_stop_before_anything_is_made(program, elsewhere):
    for arguments in (
        ["optim.learning_rat=1e-4"],
        ["method=orpp"],
        ["+lora.rnak=4"],
        ["method.weight=abc"],
        ["-m", "seed=0,1", "head=fusd"],
        ["-m", "head=naive,fusd"],
        ["-m", "seed=0,-1"],
        ["experiment=absent"],
        ["data=jsonl"],
    ):
        outcome = program(TINY, *arguments)
        assert outcome.code == 1 and outcome.out == ""
        assert len(outcome.err.splitlines()) == 1, outcome.err
        assert program.configs == [] and list(elsewhere.iterdir()) == []


def test_all_mistakes_of_all_jobs_are_shown_once(program):
    outcome = program(TINY, "-m", "head=naive,fusd", "seed=0,-1,1", "method.weight=a")
    assert sorted(outcome.err.splitlines()) == [
        "Value 'a' of method.weight cannot be used for orpo (from mlxlab); allowed: number",
        "head=fusd does not exist; allowed: chunked, flash, fused, naive; did you mean 'fused'?",
        "the configuration: seed must be >= 0 and < 2^32, got -1",
    ]


def test_unknown_words(program):
    assert "did you mean 'plugins'?" in program("plugin").err
    assert program("-m", TINY, "foo").err == "'foo' is not of the form key=value; --help lists the keys\n"
    assert program("--cfg", "job", "-m", TINY).code == 1


def test_no_model(program):
    outcome = program("method=sft", "~model")
    assert outcome.code == 1 and outcome.err.startswith("model")
    assert "did you mean 'tiny_llama'?" in program("model=tiny_lama").err


# ------------------------------------------------------------------------------------------------------------ folders
def test_an_explicit_folder_is_used_once(program, elsewhere):
    assert program(TINY, "hydra.run.dir=mine").code == 0
    content = lambda: {path: path.read_bytes() for path in (elsewhere / "mine").rglob("*") if path.is_file()}
    before = content()
    assert elsewhere / "mine" / ".hydra" / "overrides.yaml" in before
    outcome = program(TINY, "hydra.run.dir=mine", "seed=1")
    assert outcome.code == 1 and len(program.configs) == 1
    assert f"the folder {elsewhere / 'mine'} already holds a run" in outcome.err
    assert content() == before


INSTANT = """
import sys, types
import mlxlab

def run(config, folder):
    folder.start({"seed": config.seed})
    return {"best_loss": 1.0}

sys.modules["mlxlab.train"] = types.SimpleNamespace(run=run)

@mlxlab.hookimpl
def mlxlab_record(record):
    pass
"""


@pytest.fixture
def instant(elsewhere) -> Path:
    """A folder in which other processes find a training loop that is instant."""
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "instant.py").write_text(INSTANT, encoding="utf-8")
    return elsewhere


def test_runs_that_start_together_have_folders_of_their_own(instant):
    processes = [start(TINY, f"seed={seed}", folder=instant) for seed in range(3)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    folders = runs(instant)
    assert len(folders) == 3
    seeds = [(read(f / "run.json")["plan"]["seed"], OmegaConf.load(f / "config.yaml").seed) for f in folders]
    assert sorted(seeds) == [(0, 0), (1, 1), (2, 2)]


def test_of_two_runs_that_start_in_one_folder_one_stops(instant):
    processes = [start(TINY, f"seed={seed}", "hydra.run.dir=same", folder=instant) for seed in (1, 2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 1]
    assert "same already holds a run" in errors[codes.index(1)]
    winner = codes.index(0) + 1
    folder = instant / "same"
    assert read(folder / "run.json")["plan"]["seed"] == OmegaConf.load(folder / "config.yaml").seed == winner
    assert read(folder / "status.json")["state"] == COMPLETED


# ---------------------------------------------------------------------------------------------------- showing things
def test_cfg(program):
    outcome = program("--cfg", "job", "--resolve", TINY, "method=dpo")
    assert outcome.code == 0
    shown = OmegaConf.create(outcome.out)
    assert shown.method == {"name": "dpo", "beta": 0.1} and shown.optim.learning_rate == 5e-5
    assert program("--cfg", "job", "data=jsonl").code == 0  # incomplete, but it can be looked at
    assert program("--cfg", "job", "experiment=heads_sweep", "-p", "train").out.startswith(
        "# @package train\niters: 20"
    )
    assert "did you mean 'learning_rate'?" in program("--cfg", "job", TINY, "optim.learning_rat=1").err


def test_help_and_info_and_version(elsewhere):
    processes = [start(*arguments, folder="/") for arguments in (["--help"], ["--info", "searchpath"])]
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for part in ("method: dpo, orpo, sft", "mlxlab plugins", "learning_rate: ${default_learning_rate"):
        assert part in texts[0]
    assert str(CONF) in texts[1]


def test_version(program):
    assert program("--version").out == f"mlxlab {mlxlab.__version__}\n"


def test_mlx_is_not_loaded_before_it_is_prepared():
    code = (
        "import sys, mlxlab.cli; assert 'mlx.core' not in sys.modules; mlxlab.Method; assert 'mlx.core' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_plugins_command(program, elsewhere):
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "broken.py").write_text("import absent_module", encoding="utf-8")
    outcome = program("plugins")
    assert outcome.code == 0
    assert ["method", "orpo", "mlxlab", mlxlab.__version__] in rows_of(outcome.out)
    assert "plugin broken (plugins/broken.py) is not loaded" in outcome.out and "absent_module" in outcome.out
    assert program("plugins", "x").code == 1


# ------------------------------------------------------------------------------------------------------------ plugins
PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
import mlxlab

@dataclass(frozen=True)
class Demo(mlxlab.Head):
    tile: int = 4

    def __post_init__(self):
        if self.tile < 1:
            raise ValueError(f"tile must be >= 1, got {self.tile}")

    def __call__(self, hidden, targets, weights):
        return hidden

@dataclass(frozen=True)
class Reversible(mlxlab.Backward):
    couplings: int = 2

    def __call__(self, program, params):
        return None

@mlxlab.hookimpl
def mlxlab_register_heads(register):
    register("demo", Demo)

@mlxlab.hookimpl
def mlxlab_register_memory(register):
    register("reversible", Reversible)

@mlxlab.hookimpl
def mlxlab_config_dirs():
    return Path(__file__).parent / "conf"

@mlxlab.hookimpl
def mlxlab_run_started(run_dir, config, plan):
    (run_dir / "seen.txt").write_text(f"{config['head']['name']} {plan['updates']}\\n", encoding="utf-8")

@mlxlab.hookimpl
def mlxlab_run_finished(run_dir, status):
    with (run_dir / "seen.txt").open("a", encoding="utf-8") as file:
        file.write(status["state"])
"""


@pytest.fixture
def plugin(elsewhere):
    folder = elsewhere / "plugins" / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "demo_sweep.yaml").write_text(
        "# @package _global_\ndefaults: [{override /head: demo}]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '4,5'}}}\n",
        encoding="utf-8",
    )
    (elsewhere / "plugins" / "demo.py").write_text(textwrap.dedent(PLUGIN), encoding="utf-8")
    return elsewhere / "plugins"


def test_components_of_a_plugin_are_options(program, plugin, elsewhere):
    outcome = program(TINY, "head=demo", "head.tile=8", "memory=[reversible,prefix_shared]", "memory.couplings=3")
    assert outcome.code == 0, outcome.err
    components = program.configs[0].components()
    assert components["head"] == {"name": "demo", "tile": 8}
    assert components["backward"] == {"name": "reversible", "couplings": 3}
    assert components["layout"] == {"name": "prefix_shared"}
    assert (runs(elsewhere)[0] / "seen.txt").read_text(encoding="utf-8") == f"demo 1\n{COMPLETED}"
    assert (
        program(TINY, "head=demo", "head.tile=0").err == "head.demo (from plugins/demo.py): tile must be >= 1, got 0\n"
    )
    assert "reversible and memory=segmented both fill" in program(TINY, "memory=[reversible,segmented]").err


def test_experiment_of_a_plugin(program, plugin):
    assert program(TINY, "experiment=demo_sweep").code == 0
    assert [(c.seed, c.resolved["head"]["name"]) for c in program.configs] == [(4, "demo"), (5, "demo")]
    assert "plugins/conf" in program("--info", "searchpath").out


def test_an_option_that_a_broken_plugin_might_have(program, elsewhere):
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "broken.py").write_text("import absent_module", encoding="utf-8")
    assert program(TINY).code == 0 and program("--help").code == 0
    outcome = program(TINY, "head=demo")
    assert outcome.code == 1 and "head=demo does not exist" in outcome.err and "absent_module" in outcome.err


def test_strict_plugins(program, elsewhere, monkeypatch):
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "broken.py").write_text("import absent_module", encoding="utf-8")
    monkeypatch.setenv("MLXLAB_STRICT_PLUGINS", "1")
    outcome = program(TINY)
    assert outcome.code == 1 and "absent_module" in outcome.err and program.configs == []


def test_config_dir_of_the_user(program, elsewhere):
    """A file of the same name as a stored option takes its place, without a word from Hydra."""
    (elsewhere / "mine" / "train").mkdir(parents=True)
    (elsewhere / "mine" / "train" / "default.yaml").write_text("iters: 4\n", encoding="utf-8")
    (elsewhere / "mine" / "train" / "short.yaml").write_text("iters: 2\n", encoding="utf-8")
    for arguments, iters in ((["train=short"], 2), ([], 4)):
        assert program(TINY, "--config-dir", "mine", *arguments).code == 0
        assert program.configs[-1].train.iters == iters
    assert program(TINY).code == 0 and program.configs[-1].train.iters is None

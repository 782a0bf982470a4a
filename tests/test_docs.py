"""What the README says is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxlab import hookspecs
from mlxlab.cli import main
from mlxlab.hookspecs import hookspec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_registration_hook_is_named():
    names = [name for name in vars(hookspecs) if name.startswith("mlxlab_") and ("register" in name or "dirs" in name)]
    assert len(names) == 5 and all(name in README for name in names) and hookspec


def test_every_option_is_named():
    for group in ("method", "memory", "head", "model", "data"):
        for option in (ROOT / "conf" / group).glob("*.yaml"):
            name = option.stem
            assert f"`{name}" in README or name == "segmented_prefix_shared", f"{group}={name} is not in README.md"


def test_the_plugin_of_the_readme_trains(elsewhere, capsys):
    code = re.search(r"```python\n# plugins/simpo\.py\n(.*?)```", README, re.S)[1]
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "simpo.py").write_text(code, encoding="utf-8")
    arguments = ["method=simpo", "method.gamma=0.5", "memory=[segmented,prefix_shared]", "head=flash"]
    code = main([*arguments, "model=tiny_llama", "data=shouting", "train.iters=2", "train.samples=0"])
    assert code == 0, capsys.readouterr().err
    (run,) = elsewhere.glob("outputs/*/*/run.json")
    assert json.loads(run.read_text(encoding="utf-8"))["plan"]["components"]["method"]["gamma"] == 0.5


@pytest.mark.parametrize("command", re.findall(r"python -m mlxlab (-m [^\n`]*|(?!-)[a-z]+\.?[a-z]*=[^\n`]*)", README))
def test_every_command_of_the_readme_composes(elsewhere, capsys, command):
    """With --cfg job, which composes and checks keys without training."""
    words = [word for word in command.split("#")[0].split() if word not in ("-m", "\\")]
    swept = [word.split("=")[0] + "=" + re.split(r",(?![^\[]*\])", word.split("=", 1)[1])[0] for word in words]
    known = [word for word in swept if not word.startswith("method=simpo") and "gamma" not in word]
    assert main(["--cfg", "job", *known]) == 0, capsys.readouterr().err

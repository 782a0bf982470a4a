"""What an installation must contain."""

from __future__ import annotations

import tomllib
from pathlib import Path

import mlxlab

ROOT = Path(mlxlab.__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_installed():
    packages = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "mlxlab").rglob("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages | {"mlxlab.conf"}


def test_files_that_are_not_python_are_installed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    assert data["mlxlab.conf"] == ["**/*.yaml"] and {f.suffix for f in (ROOT / "conf").rglob("*.*")} == {".yaml"}
    sets = [file for pattern in data["mlxlab.data"] for file in (ROOT / "mlxlab" / "data").glob(pattern)]
    others = [f for f in (ROOT / "mlxlab").rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")]
    assert sets and sorted(others) == sorted(sets)


def test_the_licence_and_readme_are_there():
    for name in [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]:
        assert (ROOT / name).read_text(encoding="utf-8").strip()

"""What a bench shows and writes: a table, bench.json, and bench.png where matplotlib is installed."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Sequence

from mlxlab import __version__, backend
from mlxlab.rundir import write_json

_COLUMNS = {
    "ms/step": ("ms", "{:.0f}"),
    "± ms": ("spread_ms", "{:.0f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "peak GB": ("peak_gb", "{:.2f}"),
    "first s": ("first_seconds", "{:.1f}"),
    "loss": ("loss", "{:.4f}"),
}


def line(result: dict[str, Any]) -> str:
    """One measured cell in one line."""
    if "error" in result:
        return result["error"]
    return ", ".join(f"{form.format(result[key])} {name}" for name, (key, form) in _COLUMNS.items())


def print_table(results: Sequence[dict[str, Any]], arguments: Sequence[str]) -> None:
    """Machine, command and one row per cell."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("cell", "length", *_COLUMNS)
    for row in results:
        values = [row["error"]] if "error" in row else [form.format(row[key]) for key, form in _COLUMNS.values()]
        table.add_row(Text(row["name"]), str(row["length"]), *map(Text, values))
    console = Console(width=None if sys.stdout.isatty() else 200)
    print(_machine())
    print("python -m mlxlab bench", *arguments)
    console.print(table)


def write(folder: Path, results: Sequence[dict[str, Any]], arguments: Sequence[str]) -> None:
    """bench.json with machine and versions, and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", {"machine": _machine(), "arguments": list(arguments), "cells": list(results)})
    print(f"written to {folder / 'bench.json'}")
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    _plot(folder / "bench.png", [row for row in results if "error" not in row])
    print(f"written to {folder / 'bench.png'}")


def _machine() -> str:
    return f"{backend.describe()}; mlxlab {__version__}, mlx-lm {metadata.version('mlx-lm')}, {platform.platform()}"


def _plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Tokens per second against peak memory, one line per cell over its lengths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["name"] for row in results):
        rows = [row for row in results if row["name"] == name]
        axes.plot([row["peak_gb"] for row in rows], [row["tokens_per_second"] for row in rows], "o-", label=name)
        for row in rows:
            axes.annotate(f" {row['length']}", (row["peak_gb"], row["tokens_per_second"]), fontsize=8)
    axes.set(xlabel="peak memory (GB)", ylabel="tokens per second", xscale="log", yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)

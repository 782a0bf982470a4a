"""`python -m mlxlab bench`: time, memory and loss of a training step, over a grid, beside other trainers.

    python -m mlxlab bench model=smollm2 method=orpo memory=none,[segmented,prefix_shared] head=fused,flash \\
        length=256 prompt=128 peers=mlx_lm

Options of the bench: `length` (tokens per sequence, a list makes a grid), `prompt` (tokens that the branches of a row
share, default half), `rows` (rows per step), `repeats` (timed steps per cell; the median counts), `peers`, `limit`
(seconds after which a cell is given up, default 1800), `output` (folder for bench.json and bench.png). Everything else
is an override of the training configuration; lists make a grid.

Peers are mlx_lm and mlx_lm_lora, each also with its gradient checkpointing (mlx_lm_checkpoint ...). They run their own
training function on the same rows; mlx_lm, which has no preference loss, gets the branches as ordinary sequences. They
compile their step; with `compile_peers=false` they do not, where that takes many minutes.

Every cell runs in a process of its own, one after the other, on the same random token rows and the same checkpoint, so
a cell that runs out of memory takes nothing else with it. `roofline` is the time that the necessary operations take at
the speed measured on this machine, as a share of the time taken; recomputation does not count as necessary.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Sequence

from mlxlab.errors import ConfigError, nearest

OPTIONS = {
    "length": "256",
    "prompt": "",
    "rows": "1",
    "repeats": "3",
    "peers": "",
    "compile_peers": "true",
    "limit": "1800",
    "output": "",
}
_CELL = "--cell"


def main(arguments: Sequence[str]) -> int:
    """Run the grid and print the table; returns the exit code."""
    if arguments[:1] == [_CELL]:
        return _child(json.loads(arguments[1]))
    if any(a in ("-h", "--help") for a in arguments):
        print(__doc__)
        return 0
    from mlxlab.bench import report

    signal.signal(signal.SIGTERM, _interrupt)
    options, overrides = _split(arguments)
    cells = _cells(options, overrides)
    results: list[dict[str, Any]] = []
    try:
        for number, cell in enumerate(cells, 1):
            print(f"[{number}/{len(cells)}] {cell['name']} length={cell['length']}", file=sys.stderr, flush=True)
            results.append({**cell, **_in_process(cell, int(options["limit"]))})
            print(f"    {report.line(results[-1])}", file=sys.stderr, flush=True)
    finally:  # what was measured is shown, even when the bench is interrupted
        report.print_table(results, arguments)
        if options["output"] and results:
            report.write(Path(options["output"]), results, arguments)
    return 1 if any("error" in result for result in results) else 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    options, overrides = dict(OPTIONS), []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"bench: {argument!r} is not of the form key=value; options: {', '.join(OPTIONS)}")
        if key in OPTIONS:
            options[key] = value
        else:
            overrides.append(argument)
    for key in ("rows", "repeats", "prompt", "limit"):
        if options[key] and not (options[key].isdigit() and int(options[key]) > 0):
            raise ConfigError(f"bench: {key} must be an integer >= 1, got {options[key]!r}")
    if options["compile_peers"] not in ("true", "false"):
        raise ConfigError(f"bench: compile_peers must be true or false, got {options['compile_peers']!r}")
    return options, overrides


def _cells(options: dict[str, str], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Peers first, then the product of all lists; every configuration is checked before the first cell runs."""
    from mlxlab.bench import peers
    from mlxlab.cli import compose_run

    lists = [[f"{key}={value}" for value in _choices(rest)] for key, _, rest in (o.partition("=") for o in overrides)]
    jobs = [list(job) for job in itertools.product(*lists)]
    configs = [compose_run(job)[0] for job in jobs]
    wanted = [peer for peer in options["peers"].split(",") if peer]
    for peer in wanted:
        if peer not in peers.PEERS:
            raise ConfigError(f"bench: peers={peer} is not known; {nearest(peer, peers.PEERS)}")
        peers.check(peer, configs[0].components()["method"]["name"])
    varying = [choices for choices in lists if len(choices) > 1]
    name = lambda job: " ".join(override for override in job if any(override in choices for choices in varying))
    compiled = "" if options["compile_peers"] == "true" else ", not compiled"
    cells = []
    for length in _choices(options["length"]):
        if not length.isdigit() or int(length) < 4:
            raise ConfigError(f"bench: length must be integers >= 4, got {length!r}")
        common = {
            "length": int(length),
            "prompt": int(options["prompt"] or int(length) // 2),
            "rows": int(options["rows"]),
            "repeats": int(options["repeats"]),
            "compile_peers": options["compile_peers"] == "true",
        }
        if common["prompt"] > common["length"] - 2:
            raise ConfigError(f"bench: prompt={common['prompt']} must leave 2 of length={length} tokens")
        cells += [{"name": peer + compiled, "peer": peer, "overrides": jobs[0], **common} for peer in wanted]
        cells += [{"name": name(job) or "mlxlab", "peer": None, "overrides": job, **common} for job in jobs]
    return cells


def _choices(text: str) -> list[str]:
    """Split at commas outside of brackets: `none,[segmented,prefix_shared]` has two choices."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _in_process(cell: dict[str, Any], limit: int) -> dict[str, Any]:
    """Measure a cell in a child process, which ends when this process does, however that happens."""
    environment = dict(os.environ)
    if cell["peer"]:
        environment["MLXLAB_BLAS"] = "off"  # a peer runs as its users run it
        if not cell["compile_peers"]:
            environment["MLX_DISABLE_COMPILE"] = "1"
    command = [sys.executable, "-m", "mlxlab", "bench", _CELL, json.dumps(cell)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        held, child.stdin = child.stdin, None  # open as long as this process lives; communicate() would close it
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit} s"}
        finally:
            child.kill()
            held.close()
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        lines = err.strip().splitlines() or [f"exit code {child.returncode}"]
        return {"error": lines[-1][:300]}


def _child(cell: dict[str, Any]) -> int:
    def watch() -> None:
        sys.stdin.read()  # returns when the parent is gone
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    from mlxlab.bench.cell import run_cell

    print("\n" + json.dumps(run_cell(cell)))
    return 0

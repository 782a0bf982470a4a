"""The command line: plugins, configuration, then one run or several."""

from __future__ import annotations

import io
import math
import os
import sys
import traceback
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from hydra.errors import CompactHydraException

from mlxlab import __version__, backend
from mlxlab.errors import ConfigError, MlxlabError, NonFiniteError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mlxlab.config import RunConfig
    from mlxlab.registry import Registry
    from mlxlab.table import Job

# first word of the command line -> function(arguments) -> exit code
COMMANDS = {
    "plugins": "mlxlab.cli:plugins",
    "models": "mlxlab.models.report:main",
    "data": "mlxlab.data.preview:main",
    "doctor": "mlxlab.doctor:main",
    "bench": "mlxlab.bench:main",
    "evaluate": "mlxlab.evaluate:main",
}
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's variable: 1 shows tracebacks of all errors

_jobs: list[Job] = []  # that ran in this process
_shown: list[Exception] = []  # errors that a job has printed already


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program name) and return the exit code: 0, 1 on failure, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 must not end a run that prints text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        backend.prepare()  # before anything imports MLX
        if arguments == ["--version"]:
            print(f"mlxlab {__version__}")
            return 0
        first = arguments[0] if arguments else ""
        if first in COMMANDS:
            module, _, function = COMMANDS[first].partition(":")
            return getattr(import_module(module), function)(arguments[1:])
        if first and first[0] != "-" and "=" not in first and not first.startswith("~"):
            raise ConfigError(
                f"{first!r} is neither of the form key=value (--help lists the keys) nor a command; "
                f"{nearest(first, COMMANDS)}"
            )
        return run(arguments)
    except CompactHydraException as error:  # MlxlabError is one
        if os.environ.get(FULL_ERROR) == "1":
            raise
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as exit:  # of Hydra after --help, of argparse after a wrong flag
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)


def plugins(arguments: Sequence[str]) -> int:
    """`mlxlab plugins`: what is registered, by whom, and what could not be loaded."""
    from mlxlab.discovery import load_plugins
    from mlxlab.table import print_plugins

    if arguments:
        raise ConfigError(f"mlxlab plugins takes no arguments, got {' '.join(arguments)}.")
    print_plugins(load_plugins())
    return 0


def run(arguments: list[str]) -> int:
    """Everything else is Hydra's command line, checked before Hydra acts on it."""
    import hydra
    from hydra._internal.utils import get_args_parser

    from mlxlab.compose import Composer
    from mlxlab.discovery import load_plugins
    from mlxlab.publish import CONF, publish
    from mlxlab.table import print_jobs

    parser = get_args_parser()
    parser.prog = "mlxlab"
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.cfg and parsed.multirun:
        raise ConfigError("--cfg shows a configuration instead of running; leave out either --cfg or --multirun.")
    flags = list(arguments)
    for override in parsed.overrides:
        flags.remove(override)
    # Hydra's own parsing wants the overrides in one piece: `head=fused -m seed=0,1` is fine here
    with _command_line([*parsed.overrides, *flags]):
        registry = load_plugins()
        publish(registry, [Path(parsed.config_dir)] if parsed.config_dir else [])
        multirun = False
        shows = parsed.help, parsed.hydra_help, parsed.info, parsed.shell_completion, parsed.experimental_rerun
        if not any(shows):
            composer = Composer(parsed, registry)
            composer.check(build=parsed.cfg is None)
            multirun = parsed.cfg is None and composer.multirun()
        _jobs.clear()
        _shown.clear()
        try:
            hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(task)()
        except CompactHydraException as error:
            if error not in _shown:
                raise
        except Exception as error:
            if error not in _shown:
                traceback.print_exc()
                return 1
        finally:
            if multirun and _jobs:
                print_jobs(_jobs)
        return int(any(job.error for job in _jobs))


def compose_run(overrides: Sequence[str]) -> tuple[RunConfig, Registry]:
    """The checked configuration of one run, for commands that take the same `key=value` arguments."""
    from hydra._internal.utils import get_args_parser

    from mlxlab.compose import Composer, in_job
    from mlxlab.config import build_config
    from mlxlab.discovery import load_plugins
    from mlxlab.publish import publish

    registry = load_plugins()
    publish(registry)
    composer = Composer(get_args_parser().parse_args(list(overrides)), registry)
    return in_job(composer.compose(overrides), lambda job: build_config(job, registry)), registry


def task(cfg: DictConfig) -> float | None:
    """One run: Hydra calls this with the composed configuration. Returns the best validation loss."""
    from hydra.core.hydra_config import HydraConfig

    from mlxlab.config import build_config
    from mlxlab.discovery import load_plugins
    from mlxlab.publish import register_resolvers
    from mlxlab.rundir import COMPLETED, FAILED, INTERRUPTED, RunFolder
    from mlxlab.table import Job

    settings = HydraConfig.get()
    overrides = tuple(settings.overrides.task)
    # a launcher may have started this process, so nothing is taken for loaded
    registry = load_plugins()
    register_resolvers(registry)
    # relative paths are relative to where the program was started, whatever hydra.job.chdir says
    os.chdir(settings.runtime.cwd)
    number = settings.job.num if "num" in settings.job else 0
    path, error, state = Path(settings.runtime.output_dir), None, FAILED
    summary: dict[str, Any] = {}
    folder = None
    try:
        folder = RunFolder(path, registry, overrides)
        folder.keep_hydra(cfg, settings)
        config = build_config(cfg, registry)
        folder.configure(config.resolved)
        with _exit_is_failure():
            summary = import_module("mlxlab.train").run(config, folder)
        loss = summary.get("best_loss")
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteError(f"the best validation loss is {loss}; lower optim.learning_rate, or check the data.")
        state = COMPLETED
        return loss
    except KeyboardInterrupt:
        state, error = INTERRUPTED, "interrupted"
        raise
    except Exception as exception:
        error = _describe(exception)
        if isinstance(exception, MlxlabError) and os.environ.get("MLXLAB_FULL_ERROR") != "1":
            print(exception, file=sys.stderr)
        else:
            traceback.print_exc()
        _shown.append(exception)
        raise
    finally:
        _jobs.append(Job(number, overrides, path, state, error))
        if folder is not None:
            folder.finish(state, error, **{key: summary.get(key) for key in ("best_loss", "best_step", "best_margin")})
            print(f"run folder: {path} ({state})")


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and raises instead of exiting only with its variable for full errors."""
    argv, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = ["mlxlab", *arguments]
    os.environ[FULL_ERROR] = "1"
    os.environ["MLXLAB_FULL_ERROR"] = full_error or "0"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ[FULL_ERROR], os.environ["MLXLAB_FULL_ERROR"]
        if full_error is not None:
            os.environ[FULL_ERROR] = full_error


@contextmanager
def _exit_is_failure() -> Iterator[None]:
    """A library that calls exit() must not end a run with success."""
    try:
        yield
    except SystemExit as exit:
        raise RuntimeError(f"the run was ended by a call of exit({exit.code!r})") from exit


def _describe(exception: BaseException) -> str:
    text = " ".join(str(exception).split())
    return text if isinstance(exception, MlxlabError) else f"{type(exception).__name__}: {text}"

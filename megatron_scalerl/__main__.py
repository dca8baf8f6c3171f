"""The command line: `megatron-scalerl COMMAND`, or `python -m megatron_scalerl COMMAND`.

Commands are listed in `COMMANDS`; only the module of the command that is given is imported.

A Python that is too old, or a missing package, is reported in one line (`explained`). This file also runs outside the
environment, so the imports are from the standard library alone, and older Pythons can parse the syntax.
"""

import argparse
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import megatron_scalerl

OLDEST = (3, 11)
"""The oldest supported Python version."""
_INSTALLER = Path(__file__).parents[1] / "tools" / "install.sh"
_MADE = "make the environment with tools/install.sh cpu (or gpu) and enter it with source .venv/bin/activate"
_EXTRA = "pip install 'megatron_scalerl[run]' brings it; to train, clone the repository and run its tools/install.sh"
"""Advice for a missing package if megatron_scalerl was installed by pip, without a clone of the repository."""


@contextmanager
def explained() -> Iterator[None]:
    """Context for imports and commands: reports in one line what the environment lacks, and exits with code 2.

    Raises SystemExit for a Python before 3.11 and for a package that is not installed. A missing module of
    megatron_scalerl itself is a bug: its ModuleNotFoundError propagates.
    """
    if tuple(sys.version_info[:2]) < OLDEST:
        oldest, running = (".".join(map(str, version[:2])) for version in (OLDEST, sys.version_info))
        _end(f"{sys.executable} is Python {running}, and {oldest} is the oldest that is supported; {_MADE}")
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "megatron_scalerl"):
            raise
        remedy = _EXTRA
        if _INSTALLER.exists():
            remedy = _MADE
        _end(f"package {package!r} is not installed for {sys.executable}; {remedy}")


def _end(line: str) -> None:
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        path = path.parent
    print(f"{path.name}: {line}", file=sys.stderr)
    raise SystemExit(2)


PROGRAM = "megatron-scalerl"


class Command(NamedTuple):
    """A command of the command line."""

    help: str
    """Description of the command in `megatron-scalerl --help`."""
    module: str
    """Module below megatron_scalerl with `add_arguments` and `run`, see `megatron_scalerl.commands`."""
    os_error_code: int = 1
    """Exit code for an OSError: 2 (user error) for a command whose files are all named by the user."""
    runs_policies: bool = False
    """True if `main` checks the versions of torch, Megatron-Core and vLLM before the command runs."""
    forms_groups: bool = False
    """True if the process of the command itself, and not a child process, forms torch's process groups."""


COMMANDS = {
    "init": Command("write a recipe for a policy, a file of prompts and a number of GPUs", "commands.init"),
    "train": Command("run a recipe on this machine, or resume its run", "commands.train", runs_policies=True),
    "study": Command("run recipes with several seeds each, one after another, and compare them", "commands.study"),
    "submit": Command(
        "run a recipe or a folder of them on Slurm, or show the status of a submitted run", "cluster.slurm_command"
    ),
    "engine": Command("add an engine on this host to a run on several hosts", "commands.engine", runs_policies=True),
    "prompts": Command(
        "show prompts as the policy gets them, what is skipped, and how answers score", "commands.prompts"
    ),
    "sft": Command(
        "warm-start the recipe's policy by supervised training", "commands.sft", runs_policies=True, forms_groups=True
    ),
    "report": Command("report gain, cost and forecast of a run", "commands.report"),
    "watch": Command("show a run in a browser while it goes on, with its completions", "commands.watch"),
    "show": Command("print a completion of a run with its forced tokens marked", "commands.show"),
    "fit": Command("fit a compute-performance curve and forecast it", "fit.command", 2),
    "plan": Command("compute whether a recipe fits its GPUs, and what it costs", "plan.command", 2),
    "convert": Command(
        "convert checkpoints between Hugging Face and Megatron", "commands.convert", runs_policies=True
    ),
    "export": Command("write a run's newest checkpoint as a Hugging Face folder", "commands.export"),
    "evaluate": Command(
        "score a policy on evaluation files, at several thinking budgets", "commands.evaluate", runs_policies=True
    ),
    "doctor": Command("check this node before a run starts on it", "cluster.doctor_command"),
}

REMOVED = {
    "contamination": "the command contamination is gone; train writes the training prompts that contain problems of "
    "evaluation.files to RUN/contamination.json, and evaluate --training FILE writes them to OUT/summary.json"
}
"""Removed command -> message that names the replacement."""

EPILOG = f"""`{PROGRAM} COMMAND --help` describes the options of a command.

exit codes:
  0    done
  1    a process or an operation failed, or nothing was left to train on; repeat train or convert to resume
  2    user error, in one line: file, key or row, and what is wrong with it
  75   SIGUSR1 asked the run to save and exit; repeat the command to resume the run
  76   another controller has the run
  77   Slurm has taken a host of the trainer, or of too many engines, out of the job; another job resumes the run
  130  interrupted (SIGINT)
  143  terminated (SIGTERM)

environment variables:
  MSRL_TRACEBACK=1      print the traceback of an error; RUN/logs/controller.log has the traceback of a failed run
  MSRL_LOG_LEVEL=LEVEL  debug, info (default), warning or error, for the log files in RUN/logs
"""


def program() -> int:
    """Entry point of `megatron-scalerl`: run `main` and return the exit code.

    A command that forms process groups ends the process without Python's cleanup, which may abort (`end_with`).
    """
    command = COMMANDS.get(_named(sys.argv[1:]))
    if command and command.forms_groups:
        with explained():
            from megatron_scalerl.processes.child_process import end_with

            end_with(main)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    argv: command and arguments; None: `sys.argv`. Raises SystemExit for arguments that cannot be parsed, and if a
    package is missing.
    """
    if argv is None:
        argv = sys.argv[1:]
    with explained():
        word = next((word for word in argv if not word.startswith("-")), "")
        if word in REMOVED:
            return _failed(ValueError(REMOVED[word]), 2)
        command, arguments = _parse(argv)
        from rich.console import Console

        from megatron_scalerl.distributed.installed import check_installed
        from megatron_scalerl.processes.logs import LEVEL_VARIABLE, log_to_terminal
        from megatron_scalerl.processes.signals import Stopped

        # hides what Megatron-Core warns at every import: Transformer Engine and apex are missing
        warnings.filterwarnings("ignore", module=r"(megatron\.core|torch|transformers)\.")
        if arguments.verbose:
            os.environ[LEVEL_VARIABLE] = "debug"
        try:
            with log_to_terminal():
                if command.runs_policies:
                    check_installed()
                console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
                code: int = _module(command).run(arguments, console)
        except ValueError as error:
            return _failed(error, getattr(error, "exit_code", 2))
        except OSError as error:
            return _failed(error, command.os_error_code)
        except RuntimeError as error:
            return _failed(error, getattr(error, "exit_code", 1))
        except KeyboardInterrupt as interrupt:
            return _failed(interrupt, 130)
        except Stopped as stop:
            return _failed(stop, stop.exit_code)
        return code


def _failed(error: BaseException, code: int) -> int:
    if os.environ.get("MSRL_TRACEBACK"):
        traceback.print_exception(error)
    from megatron_scalerl.processes.logs import printable

    text = str(error) or "interrupted"
    if code == 2:
        if isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}"
        text = " ".join(text.split())
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print(printable(f"{PROGRAM}: {text}{notes}"), file=sys.stderr)
    return code


def _parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    """The command and its parsed arguments. Overrides of the recipe (KEY=VALUE) may stand before, between and after
    options, which argparse alone does not allow.

    Raises SystemExit for unknown arguments.
    """
    name = _named(argv)
    parser = _parser(name)
    arguments, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text or "overrides" not in arguments]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides += rest
    return COMMANDS[name], arguments


def _named(argv: Sequence[str]) -> str:
    return next((word for word in argv if word in COMMANDS), "")


def _parser(name: str) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the command `name` alone."""
    layout = argparse.RawDescriptionHelpFormatter
    description = "Reinforcement learning of reasoning policies with the ScaleRL recipe, and its forecast."
    parser = argparse.ArgumentParser(prog=PROGRAM, description=description, epilog=EPILOG, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {megatron_scalerl.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for key, command in COMMANDS.items():
        subparser = subparsers.add_parser(key, help=command.help, formatter_class=layout)
        subparser.add_argument("-v", "--verbose", action="store_true", help="log at debug level, in all processes")
        if key == name:
            _module(command).add_arguments(subparser)
    return parser


def _module(command: Command) -> Any:
    return importlib.import_module(f"megatron_scalerl.{command.module}")


if __name__ == "__main__":
    sys.exit(program())

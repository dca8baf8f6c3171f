"""The command line: `python -m megatron_scalerl train | sft | report | export | check-gpu`, or `megatron-scalerl`.

Exit codes: 0 done, 1 a process or an update failed (start again to go on from the last checkpoint), 2 a
mistake in what was given (one line says which), 130 stopped by SIGINT, 143 stopped by SIGTERM. MSRL_TRACEBACK=1
prints the traceback before the line; a run that failed under way has it in RUN/logs/controller.log.

The recipe is read and its files are looked for before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_scalerl.environment import explained

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Raises SystemExit for arguments that cannot be parsed, and where a package is missing.
    """
    with explained():
        arguments = _parse(argv)
        from rich.console import Console

        from megatron_scalerl.processes.signals import Stopped

        try:
            return arguments.command(arguments, Console(soft_wrap=True))
        except ValueError as mistake:
            return _failed(mistake, 2)
        except (RuntimeError, OSError) as failure:
            return _failed(failure, 1)
        except Stopped as stop:
            return _failed(stop, stop.exit_code)


def _failed(error: BaseException, code: int) -> int:
    if os.environ.get("MSRL_TRACEBACK"):
        traceback.print_exception(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = " ".join(str(error).split()) if code == 2 else str(error)
    print(f"megatron_scalerl: {text}{notes}", file=sys.stderr)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments with overrides allowed on both sides of an option, which argparse alone refuses."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    strange = [text for text in rest if text.startswith("-") or "=" not in text or "overrides" not in arguments]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    from megatron_scalerl.check_gpu.command import add_arguments, check_gpu

    parser = argparse.ArgumentParser(prog="python -m megatron_scalerl", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a recipe on this machine, or go on with it")
    train.set_defaults(command=_train)
    sft = commands.add_parser("sft", help="warm-start the recipe's policy on examples")
    sft.add_argument("--out", required=True, help="Hugging Face folder to write")
    sft.set_defaults(command=_sft)
    for command in (train, sft):
        command.add_argument("recipe", help="recipe file (YAML)")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the recipe's")
    report = commands.add_parser("report", help="what a run gained, what it cost, how its forecast met it")
    report.add_argument("run_dir", help="folder of the run")
    report.set_defaults(command=_report)
    export = commands.add_parser("export", help="a run's newest checkpoint as a Hugging Face folder")
    export.add_argument("run_dir", help="folder of the run")
    export.add_argument("--out", required=True, help="folder to write")
    export.set_defaults(command=_export)
    check = commands.add_parser("check-gpu", help="check correctness and speed on the GPUs of this machine")
    add_arguments(check)
    check.set_defaults(command=check_gpu)
    return parser


def _train(arguments: argparse.Namespace, console: Console) -> int:
    recipe = _recipe(arguments)
    _quiet_upstream()
    from megatron_scalerl.controller.train import train

    reason = train(recipe, console)
    console.print(f"{recipe.run_dir}: {reason}", highlight=False)
    return 0


def _sft(arguments: argparse.Namespace, console: Console) -> int:
    recipe = _recipe(arguments)
    _quiet_upstream()
    from megatron_scalerl.sft import run_sft

    run_sft(recipe, arguments.out)
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe, once the files that the command reads are known to be there."""
    from megatron_scalerl.recipe.file import load_recipe
    from megatron_scalerl.recipe.input_files import check_policy, check_prompts

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_policy(recipe)
    if arguments.command is _train:
        check_prompts(recipe)
    return recipe


def _report(arguments: argparse.Namespace, console: Console) -> int:
    from megatron_scalerl.report import report

    report(arguments.run_dir, console)
    return 0


def _export(arguments: argparse.Namespace, console: Console) -> int:
    _quiet_upstream()
    from megatron_scalerl.export import export

    step = export(arguments.run_dir, arguments.out)
    console.print(f"{arguments.out}: the policy of step {step}", highlight=False)
    return 0


def _quiet_upstream() -> None:
    """Megatron-Core says at every import that Transformer Engine and apex are absent."""
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\.")


if __name__ == "__main__":
    sys.exit(main())

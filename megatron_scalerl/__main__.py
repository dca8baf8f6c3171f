"""The command line: `python -m megatron_scalerl train | sft | report | export ...`.

Exit codes: 0 done, 1 a process or an update failed (start again to go on from the last checkpoint), 2 a
mistake in what was given (one line says which), 130 stopped by SIGINT, 143 stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from megatron_scalerl.launch.signals import Stopped


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parse(argv)
    console = Console(soft_wrap=True)
    try:
        return arguments.command(arguments, console)
    except ValueError as mistake:
        print(f"megatron_scalerl: {mistake}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as failure:
        print(f"megatron_scalerl: {failure}", file=sys.stderr)
        return 1
    except Stopped as stop:
        print(f"megatron_scalerl: {stop}", file=sys.stderr)
        return stop.exit_code


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
    return parser


def _train(arguments: argparse.Namespace, console: Console) -> int:
    from megatron_scalerl.recipe_file import load_recipe
    from megatron_scalerl.train import train

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    reason = train(recipe, console)
    console.print(f"{recipe.run_dir}: {reason}", highlight=False)
    return 0


def _sft(arguments: argparse.Namespace, console: Console) -> int:
    _quiet_upstream()
    from megatron_scalerl.recipe_file import load_recipe
    from megatron_scalerl.sft import run_sft

    run_sft(load_recipe(arguments.recipe, arguments.overrides), arguments.out)
    return 0


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

"""`megatron-scalerl train RECIPE`: run a recipe on this machine, or resume its run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.recipe import Recipe

EPILOG = """examples:
  megatron-scalerl train my_run.yaml                                   start, or resume after an interruption
  megatron-scalerl train my_run.yaml optimizer.lr=1e-6 engine.count=2  override settings
  megatron-scalerl train --supervise my_run.yaml                       start it again whenever it fails

A recipe states differences from the defaults in megatron_scalerl/recipe/sections.py. The run's folder is
output_dir/name. A run that failed or was stopped resumes from its last checkpoint with the same command."""


PROGRAM = (sys.executable, "-m", "megatron_scalerl")
"""The program that `--supervise` starts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Run a recipe on this machine, or resume its run."
    parser.epilog = EPILOG
    parser.add_argument("--supervise", action="store_true", help="start the run again when it fails or is killed")
    parser.add_argument(
        "--max-failures",
        type=int,
        default=5,
        metavar="N",
        help="with --supervise: restarts without a new checkpoint in between (default: %(default)s)",
    )
    add_recipe(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the recipe until it ends. Raises ValueError for user errors, RuntimeError and OSError for failures."""
    from megatron_scalerl.recipe.input_files import check_prompts

    recipe = recipe_of(arguments)
    check_prompts(recipe)
    if arguments.supervise:
        from megatron_scalerl.commands.supervise import supervise

        verbose = ["--verbose"] if arguments.verbose else []
        command = [
            *PROGRAM,
            "train",
            *verbose,
            arguments.recipe,
            *arguments.overrides,
        ]
        return supervise(command, recipe.run_dir, restarts=arguments.max_failures)
    from megatron_scalerl.controller.train import train

    reason = train(recipe, console)
    console.print(f"{recipe.run_dir}: {reason}", highlight=False)
    return 0


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the recipe file and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the recipe's")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe with its overrides. Raises ValueError for a bad recipe and where its policy does not exist."""
    from megatron_scalerl.recipe.file import load_recipe
    from megatron_scalerl.recipe.input_files import check_policy

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_policy(recipe)
    return recipe

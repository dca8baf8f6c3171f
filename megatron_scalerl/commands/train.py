"""`megatron-scalerl train RECIPE`: run a recipe on this machine or on several, or resume its run."""

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
  megatron-scalerl train my_run.yaml overlay=recipes/ablations/dapo_loss.yaml  with the differences in a file
  megatron-scalerl train --supervise my_run.yaml                       start it again whenever it fails
  megatron-scalerl train my_run.yaml --hosts a,b,c --slots 8           over hosts that `ssh` reaches
  megatron-scalerl train my_run.yaml --hosts slurm                     over the hosts of the allocation
  megatron-scalerl train my_run.yaml --hosts ray:4 --slots 8           over four nodes of a Ray cluster

A recipe states differences from the defaults in megatron_scalerl/recipe/sections.py. The run's folder is
output_dir/name. A run that failed or was stopped resumes from its last checkpoint with the same command;
without a checkpoint it begins anew."""


PROGRAM = (sys.executable, "-m", "megatron_scalerl")
"""The program that `--supervise` starts as a child process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Run a recipe on this machine or on several, or resume its run."
    parser.epilog = EPILOG
    parser.add_argument("--supervise", action="store_true", help="start the run again whenever it fails or is killed")
    parser.add_argument(
        "--max-failures",
        type=int,
        default=5,
        metavar="N",
        help="with --supervise: most restarts without a new checkpoint in between (default: %(default)s)",
    )
    several = parser.add_argument_group("several hosts, which share the run's folder")
    several.add_argument(
        "--hosts",
        metavar="A,B",
        help="names of hosts; slurm: the hosts of the allocation; ray[:N]: N nodes of a Ray cluster",
    )
    several.add_argument(
        "--slots", type=int, metavar="N", help="number of devices of each host (default with slurm: its GPUs)"
    )
    several.add_argument(
        "--run-on",
        metavar="COMMAND",
        help="command that runs a shell line, its last argument, on {host} (default: ssh {host})",
    )
    several.add_argument(
        "--address",
        metavar="ADDRESS",
        help="address by which other hosts reach this host (default: found from the route to the hosts)",
    )
    add_recipe(parser)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the recipe to the end. Raises ValueError for wrong options or recipes, RuntimeError and OSError for
    failures of the run."""
    from megatron_scalerl.launch.hosts import hosts_of
    from megatron_scalerl.recipe.file import check_prompts

    recipe = recipe_of(arguments)
    check_prompts(recipe)
    if arguments.supervise:
        from megatron_scalerl.commands.supervise import supervise

        command = [*PROGRAM, "train", *_passed_on(arguments), arguments.recipe, *arguments.overrides]
        return supervise(command, recipe.run_dir, restarts=arguments.max_failures)
    from megatron_scalerl.controller.train import train

    hosts = hosts_of(
        arguments.hosts,
        slots=arguments.slots,
        run_on=arguments.run_on,
        address=arguments.address,
        transport=recipe.weights.transport,
    )
    reason = train(recipe, console, hosts)
    console.print(f"{recipe.run_dir}: {reason}")
    return 0


def _passed_on(arguments: argparse.Namespace) -> list[str]:
    """The given options that `--supervise` passes on to the child process."""
    words = []
    if arguments.verbose:
        words.append("--verbose")
    for name in ("hosts", "slots", "run_on", "address"):
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe file and overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file (YAML)")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that override the recipe's; overlay=FILE takes the settings of a file",
    )


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe with the overrides. Raises ValueError for a bad recipe, and for a policy that does not exist."""
    from megatron_scalerl.recipe.file import check_policy, load_recipe
    from megatron_scalerl.recipe.hub import local_recipe

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    recipe = local_recipe(recipe, download=recipe.download)
    check_policy(recipe)
    return recipe

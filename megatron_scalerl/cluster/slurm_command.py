"""`megatron-scalerl submit`: run a recipe on Slurm, or a folder of recipes; show the status of a submitted run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_scalerl.cluster.doctor_command import WITHIN_S

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.cluster.allocation import Request

EPILOG = """examples:
  megatron-scalerl submit my_run.yaml --partition gpu --time 24:00:00 --site site.yaml
  megatron-scalerl submit my_run.yaml --partition gpu --time 24:00:00 --dry-run      write and check the job script
  megatron-scalerl submit --status runs/my_run                                       job, step, cost, last error
  megatron-scalerl submit my_run.yaml engine.count=12 --nodes 2 --partition gpu --time 24:00:00 --gpu-hours 5000
  megatron-scalerl submit --array recipes/study --throttle 4 --partition gpu --time 24:00:00
  megatron-scalerl submit --array recipes/ablations --base my_run.yaml --seeds 3 --partition gpu --time 24:00:00

The job's script is RUN/slurm/job.sbatch, which can be edited and submitted by hand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Submit a run to Slurm. Before the time limit a job saves the run and is queued again, until the run is "
        "finished or the budget is spent."
    )
    parser.epilog = EPILOG
    selection = parser.add_argument_group("what")
    selection.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (YAML)")
    selection.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that override the recipe's; overlay=FILE takes the settings of a file",
    )
    selection.add_argument("--array", metavar="FOLDER", help="every recipe (*.yaml) of a folder, as one job array")
    selection.add_argument(
        "--base", metavar="RECIPE", help="with --array: the recipe that the folder's overlays change"
    )
    selection.add_argument("--seeds", type=int, metavar="N", help="with --array: runs of each recipe, seeds 1 to N")
    selection.add_argument("--throttle", type=int, metavar="N", help="with --array: runs at a time (default: all)")
    selection.add_argument(
        "--status", type=Path, metavar="RUN", help="job, progress, cost and last error of a submitted run"
    )
    selection.add_argument(
        "--seconds-left",
        type=Path,
        metavar="RECIPE",
        help="print for how many seconds --gpu-hours still pays for the run; for use by the job script",
    )
    _add_job_arguments(parser.add_argument_group("job"))


def _add_job_arguments(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--partition", metavar="P", help="partition")
    job.add_argument("--time", metavar="T", help="time limit of one job: MINUTES, H:MM:SS or D-HH:MM:SS")
    job.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: %(default)s)")
    of_node = "on one node a GPU for each rank and engine device, on several nodes all GPUs"
    for names, text in (
        (("--gpus-per-node", "--gpus"), f"GPUs of a node (default: {of_node})"),
        (("--slots",), "with several nodes without GPUs: number of ranks and engine devices of a node"),
        (("--cpus",), "CPUs of a node (default: the GPUs' share of the node)"),
    ):
        job.add_argument(*names, type=int, metavar="N", help=text)
    job.add_argument(
        "--gpu-hours", type=float, metavar="H", help="budget of all attempts in device-hours, by the run's ledger"
    )
    job.add_argument("--site", type=Path, metavar="FILE", help="site file (YAML): account, modules, container, ...")
    job.add_argument(
        "--dry-run", action="store_true", help="write and check the job script, submit nothing; works without Slurm"
    )
    job.add_argument(
        "--max-requeues",
        type=int,
        default=20,
        metavar="N",
        help="how often a job is queued again before its time limit (default: %(default)s)",
    )
    job.add_argument("--chain", action="store_true", help="submit N (--max-requeues) further jobs, one after another")
    job.add_argument(
        "--max-failures",
        type=int,
        default=3,
        metavar="N",
        help="restarts within a job without a new checkpoint in between (default: %(default)s)",
    )
    job.add_argument(
        "--check-seconds",
        type=float,
        default=WITHIN_S,
        metavar="S",
        help="with several nodes: exclude a node that has not reported its check after S s (default: %(default)g)",
    )
    job.add_argument("--startup-seconds", type=float, metavar="S", help="time to first step (default: slowest seen)")
    job.add_argument("--save-seconds", type=float, metavar="S", help="time of step and save (default: slowest seen)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Submit, or print the status. Raises ValueError for wrong input, RuntimeError where Slurm fails."""
    for line in _lines(arguments):
        console.print(line)
    return 0


def _lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines for the user, printed while the command works."""
    if arguments.status is not None:
        from megatron_scalerl.cluster.slurm_status import status

        yield from status(arguments.status)
    elif arguments.seconds_left is not None:
        from megatron_scalerl.cluster.slurm_status import seconds_left

        if arguments.gpu_hours is None:
            raise ValueError("--seconds-left requires --gpu-hours")
        yield str(seconds_left(arguments.seconds_left, arguments.gpu_hours))
    else:
        yield from _submit(arguments)


def _submit(arguments: argparse.Namespace) -> Iterator[str]:
    # argparse takes the first override for the recipe, but an array has no recipe
    if arguments.array is not None and "=" in (arguments.recipe or ""):
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = None
    request = _request(arguments)
    from megatron_scalerl.cluster import cluster

    if not cluster.slurm_is_present() and not arguments.dry_run:
        raise ValueError("sbatch is not on the path; submit from a login node, or add --dry-run")
    from megatron_scalerl.cluster.submission import array_name, recipes_of, submit

    array = arguments.array is not None
    source = arguments.array if array else arguments.recipe
    recipes, duplicates = recipes_of(
        source, arguments.overrides, array=array, base=arguments.base, seeds=arguments.seeds
    )
    yield from (f"{name} is left out, since the recipe is equal to {earlier}" for name, earlier in duplicates.items())
    if array and request.throttle is None:
        request = replace(request, throttle=len(recipes))
    name = array_name(source, arguments.base) if array else recipes[0].name
    yield from submit(recipes, name, request, recipe_file=arguments.recipe, dry_run=arguments.dry_run)


def _request(arguments: argparse.Namespace) -> Request:
    """The request by the options. Raises ValueError for options that contradict each other."""
    from megatron_scalerl.cluster.allocation import Request

    if (arguments.recipe is None) == (arguments.array is None):
        raise ValueError("give exactly one of RECIPE, --array FOLDER and --status RUN")
    for key in ("partition", "time"):
        if getattr(arguments, key) is None:
            raise ValueError(f"--{key} is missing; every job needs a partition and a time limit")
    for key in ("throttle", "base", "seeds"):
        if getattr(arguments, key) is not None and arguments.array is None:
            raise ValueError(f"{_option(key)} requires --array")
    minimums = dict.fromkeys(("throttle", "seeds", "nodes", "slots", "check_seconds"), 1)
    zero_keys = ("max_requeues", "max_failures", "startup_seconds", "save_seconds")
    for key, minimum in (minimums | dict.fromkeys(zero_keys, 0)).items():
        if (value := getattr(arguments, key)) is not None and not value >= minimum:
            raise ValueError(f"{_option(key)} is {value}; it has to be at least {minimum}")
    if (hours := arguments.gpu_hours) is not None and not 0 < hours < float("inf"):
        raise ValueError(f"--gpu-hours is {hours:g}; it has to be more than 0 and finite")
    return Request(**{field.name: getattr(arguments, field.name) for field in fields(Request)})


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"

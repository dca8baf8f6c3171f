"""`megatron-scalerl submit`: run a recipe on Slurm, or a folder of recipes; say how a run fares there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.slurm.submission import Request

EPILOG = """examples:
  megatron-scalerl submit my_run.yaml --partition gpu --time 24:00:00 --site site.yaml
  megatron-scalerl submit my_run.yaml --partition gpu --time 24:00:00 --dry-run      write and check the job script
  megatron-scalerl submit --status runs/my_run                                       job, step, cost, last error
  megatron-scalerl submit --array recipes/study --throttle 4 --partition gpu --time 24:00:00

The job runs on one node. Its script is RUN/slurm/job.sbatch, which can be edited and submitted by hand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Submit a run to Slurm: on one node, saved and queued again before its time limit, until it is finished."
    )
    parser.epilog = EPILOG
    what = parser.add_argument_group("what")
    what.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (YAML)")
    what.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that override the recipe's")
    what.add_argument("--array", metavar="FOLDER", help="every recipe (*.yaml) of a folder, as one job array")
    what.add_argument("--throttle", type=int, metavar="N", help="with --array: runs at a time (default: all)")
    what.add_argument("--status", metavar="RUN", help="job, progress, cost and last error of a submitted run")
    job = parser.add_argument_group("job")
    job.add_argument("--partition", metavar="P", help="partition")
    job.add_argument("--time", metavar="T", help="time limit of one job: MINUTES, H:MM:SS or D-HH:MM:SS")
    job.add_argument("--gpus", type=int, metavar="N", help="GPUs (default: one for each rank and engine device)")
    job.add_argument("--cpus", type=int, metavar="N", help="CPUs (default: the GPUs' share of the node)")
    job.add_argument("--site", metavar="FILE", help="site file (YAML): account, modules, container, ...")
    job.add_argument("--dry-run", action="store_true", help="write and check the job script, submit nothing")
    job.add_argument(
        "--max-requeues",
        type=int,
        default=20,
        metavar="N",
        help="how often a job is queued again before its time limit (default: %(default)s)",
    )
    job.add_argument("--chain", action="store_true", help="submit N further jobs instead, each after the one before")
    job.add_argument(
        "--max-failures",
        type=int,
        default=3,
        metavar="N",
        help="restarts within a job without a new checkpoint in between (default: %(default)s)",
    )
    job.add_argument("--startup-seconds", type=float, metavar="S", help="time to the first step (default: measured)")
    job.add_argument("--save-seconds", type=float, metavar="S", help="time of one checkpoint (default: measured)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Submit, or print the status. Raises ValueError for user errors, RuntimeError where Slurm fails."""
    if arguments.status is not None:
        from megatron_scalerl.slurm.status import status

        if arguments.recipe is not None or arguments.array is not None:
            raise ValueError("--status: expected the folder of a run alone, found a recipe, too")
        for line in status(arguments.status):
            console.print(line, highlight=False)
        return 0
    if arguments.array is not None and "=" in (arguments.recipe or ""):  # an override in the recipe's place
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = None
    request = _request(arguments)
    from megatron_scalerl.slurm import cluster
    from megatron_scalerl.slurm.submission import recipes_of, submit

    cluster.require()
    array = arguments.array is not None
    source = arguments.array if array else arguments.recipe
    recipes = recipes_of(source, arguments.overrides, array=array)
    if array and arguments.throttle is None:
        request = _request(arguments, throttle=len(recipes))
    name = Path(source).resolve().name if array else recipes[0].name
    submission = submit(recipes, name, request, dry_run=arguments.dry_run)
    say = lambda line: console.print(line, highlight=False)  # noqa: E731
    say(f"job script: {submission.plan.script}")
    say(f"sbatch --test-only: {submission.expected}")
    if not submission.jobs:
        say("dry run: nothing is submitted")
        return 0
    say(
        f"submitted: job {', '.join(submission.jobs)}; asked to save {submission.plan.lead_s} s before its time limit"
    )
    say(f"output: {submission.plan.outputs}; logs: RUN/slurm and RUN/logs")
    for run_dir in submission.plan.runs:
        say(f"megatron-scalerl submit --status {run_dir}")
    return 0


def _request(arguments: argparse.Namespace, *, throttle: int | None = None) -> Request:
    from megatron_scalerl.slurm.submission import Request

    if (arguments.recipe is None) == (arguments.array is None):
        raise ValueError("expected one of RECIPE, --array FOLDER and --status RUN")
    for key in ("partition", "time"):
        if getattr(arguments, key) is None:
            raise ValueError(f"--{key}: expected a value, found none")
    if arguments.throttle is not None and arguments.array is None:
        raise ValueError("--throttle: expected --array with it, found none")
    for key, least in (("throttle", 1), ("max_requeues", 0), ("max_failures", 0), ("startup_seconds", 0),
                       ("save_seconds", 0)):  # fmt: skip
        if (value := getattr(arguments, key)) is not None and not value >= least:
            raise ValueError(f"--{key.replace('_', '-')}: expected at least {least}, found {value}")
    return Request(
        partition=arguments.partition,
        time=arguments.time,
        gpus=arguments.gpus,
        cpus=arguments.cpus,
        site=arguments.site,
        max_requeues=arguments.max_requeues,
        max_failures=arguments.max_failures,
        chain=arguments.chain,
        throttle=throttle or arguments.throttle,
        startup_s=arguments.startup_seconds,
        save_s=arguments.save_seconds,
    )

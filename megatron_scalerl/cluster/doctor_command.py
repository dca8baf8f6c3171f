"""The command line: `megatron-scalerl doctor [RECIPE] [options]`, and in a Slurm job `doctor --hosts slurm`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.cluster.check import Check

WITHIN_S = 300.0
"""Default of --within (s). An assumption: a check takes 10 to 30 s, longer where many nodes load packages at once."""
_COLORS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
"""Status -> color, in the order in which checks are printed."""
EPILOG = """exit codes: 0 if no check failed, 1 if a check failed, 2 for wrong arguments

examples:
  megatron-scalerl doctor my_run.yaml --json node.json
  megatron-scalerl doctor my_run.yaml --hosts slurm --reports reports    all nodes of the job

docs/doctor.md describes the checks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Check this node before a run starts on it: GPUs, versions, inputs, disks."
    parser.epilog = EPILOG
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (default: check only the node)")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that override the recipe's; overlay=FILE takes the settings of a file",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs that the run takes on this node (default: all GPUs of the recipe)",
    )
    parser.add_argument("--json", metavar="OUT|-", help="write the report as JSON too; - prints only the JSON")
    several = parser.add_argument_group("all nodes of a Slurm job, checked from the job's first node")
    several.add_argument("--hosts", choices=["slurm"], help="check and compare the nodes of this allocation")
    several.add_argument("--reports", metavar="FOLDER", help="folder for the reports, which all nodes have to see")
    several.add_argument(
        "--within",
        type=float,
        default=WITHIN_S,
        metavar="S",
        help="a node without a report after S seconds is unfit (default: %(default)g)",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check the node, or all nodes of a job. Returns 1 if a check failed or a node is unfit, else 0.

    Raises ValueError for wrong arguments, OSError for a report that cannot be written.
    """
    if bool(arguments.hosts) != bool(arguments.reports) or (arguments.hosts and arguments.json):
        raise ValueError("give --hosts and --reports together, without --json; each node writes a report")
    if not arguments.within > 0:
        raise ValueError(f"--within is {arguments.within:g}; it has to be more than 0 seconds")
    if arguments.gpus is not None and arguments.gpus < 0:
        raise ValueError(f"--gpus is {arguments.gpus}; it has to be at least 0")
    from megatron_scalerl.recipe.file import load_recipe

    # the recipe is loaded first, so that a mistake in the recipe is reported before a node is examined
    recipe = load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None
    if arguments.hosts:
        return _examine_nodes(arguments, console)

    import msgspec

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.cluster.node import examine

    checks = examine(recipe, arguments.recipe, arguments.gpus)
    report = msgspec.json.format(msgspec.json.encode(checks), indent=2) + b"\n"
    if arguments.json == "-":
        # printed by `print`, because the console would break long lines
        print(report.decode(), end="")
    else:
        _show(checks, console)
        if arguments.json:
            write_durably(Path(arguments.json), report)
    return int(any(check.status == "failed" for check in checks))


def _show(checks: list[Check], console: Console) -> None:
    """Print one line per check, failed checks last."""
    from rich.text import Text

    for status, color in _COLORS.items():
        for check in checks:
            if check.status == status:
                console.print(Text.assemble((status, color), f" {check.line}"))
    counts = Counter[str](check.status for check in checks)
    console.print(", ".join(f"{counts[status]} {status}" for status in _COLORS))


def _examine_nodes(arguments: argparse.Namespace, console: Console) -> int:
    from megatron_scalerl.cluster import doctor_nodes

    nodes = doctor_nodes.allocated_nodes()
    folder = Path(arguments.reports).absolute()
    words = []
    if arguments.recipe:
        words = [arguments.recipe, *arguments.overrides]
    if arguments.gpus is not None:
        words += ["--gpus", str(arguments.gpus)]
    bad = doctor_nodes.examine_nodes(nodes, folder, words, within_s=arguments.within)
    line = f"{len(nodes)} nodes are fit and agree: {', '.join(nodes)}"
    if bad:
        reasons = "; ".join(f"{node} ({reason})" for node, reason in bad.items())
        line = f"{len(bad)} of {len(nodes)} nodes are unfit: {reasons}"
    console.print(line)
    return int(bool(bad))

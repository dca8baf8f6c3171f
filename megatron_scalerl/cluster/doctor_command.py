"""The command line: `megatron-scalerl doctor [RECIPE] [options]`, and in a Slurm job `doctor --hosts slurm`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.cluster.node import NodeReport

WITHIN_S = 300.0
"""Default of --within. An assumption: a check takes 10 to 30 s, more where many nodes load packages at once."""
_COLORS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
"""By status, in the order in which checks are printed."""
EPILOG = """exit codes: 0 if no check failed, 1 if one did, 2 for wrong arguments

examples:
  megatron-scalerl doctor my_run.yaml --json node.json
  megatron-scalerl doctor my_run.yaml --hosts slurm --reports reports    in a job: all of its nodes

docs/doctor.md describes the checks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Check this node before a run starts on it: GPUs, versions, inputs, disks."
    parser.epilog = EPILOG
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file; without one, its needs are unknown")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that override the recipe's; overlay=FILE: those of a file",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs that the run takes on this node; default: all of the recipe's, as if it ran here alone",
    )
    parser.add_argument("--json", metavar="OUT|-", help="write the report as JSON too; - prints only the JSON")
    several = parser.add_argument_group("all nodes of a Slurm job, from its first one")
    several.add_argument("--hosts", choices=["slurm"], help="check and compare the nodes of this allocation")
    several.add_argument("--reports", metavar="FOLDER", help="folder that all nodes see, for their reports")
    several.add_argument(
        "--within",
        type=float,
        default=WITHIN_S,
        metavar="S",
        help="a node without a report after S seconds is unfit (default: %(default)g)",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Check the node, or all nodes of a job. Returns 0 or 1.

    Raises ValueError for wrong arguments, OSError for a report that cannot be written.
    """
    _check(arguments)
    from megatron_scalerl.recipe.file import load_recipe

    # checked before any node is asked
    recipe = load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None
    if arguments.hosts:
        return _examine_nodes(arguments, console)

    import msgspec

    from megatron_scalerl.checkpoints.atomic_io import write_durably
    from megatron_scalerl.cluster.node import examine

    report = examine(recipe, arguments.recipe, arguments.gpus)
    written = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if arguments.json == "-":
        print(written.decode(), end="")  # not by the console, which breaks long lines
        return int(report.failed)
    _show(report, console)
    if arguments.json:
        write_durably(Path(arguments.json), written)
    return int(report.failed)


def _show(report: NodeReport, console: Console) -> None:
    """Print one line per check, failed ones last, with what to do about one that did not pass."""
    from rich.text import Text

    ordered = sorted(report.checks, key=lambda check: list(_COLORS).index(check.status))
    console.print(f"{report.host}, {report.time}")
    for check in ordered:
        result = check.found
        if check.expected:
            result = f"expected {check.expected}, found {check.found}; {check.remedy}"
        line = Text.assemble((check.status, _COLORS[check.status]), f" {check.name}: {result}")
        console.print(line)
    counts = [f"{sum(check.status == status for check in ordered)} {status}" for status in _COLORS]
    console.print(", ".join(counts))


def _examine_nodes(arguments: argparse.Namespace, console: Console) -> int:
    from megatron_scalerl.cluster import doctor_nodes

    nodes = doctor_nodes.allocated()
    folder = Path(arguments.reports).absolute()
    words = []
    if arguments.recipe:
        words = [arguments.recipe, *arguments.overrides]
    if arguments.gpus is not None:
        words += ["--gpus", str(arguments.gpus)]
    bad = doctor_nodes.examine_nodes(nodes, folder, words, within_s=arguments.within)
    for line in doctor_nodes.verdict(folder, nodes, bad):
        console.print(line)
    return int(bool(bad))


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for arguments that contradict each other or cannot be used."""
    if arguments.hosts and arguments.reports is None:
        raise ValueError("--hosts requires --reports")
    if arguments.reports is not None and arguments.hosts is None:
        raise ValueError("--reports requires --hosts")
    if arguments.hosts and arguments.json is not None:
        raise ValueError(
            "--json cannot be given with --hosts: every node writes its report to the folder of --reports"
        )
    if not arguments.within > 0:
        raise ValueError(f"--within is {arguments.within:g}; it has to be more than 0 seconds")
    if arguments.gpus is not None and arguments.gpus < 0:
        raise ValueError(f"--gpus is {arguments.gpus}; it has to be at least 0")
    if arguments.json in (None, "-"):
        return
    target = Path(arguments.json)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"--json: {target} has to be a file in a folder that exists")

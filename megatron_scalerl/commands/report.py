"""`megatron-scalerl report RUN`: gain, cost and forecast of a run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Report what a run gained on its held-out prompts, what it cost by role, and how the forecast from its first "
        "part compares with its last part. Writes RUN/forecast.png."
    )
    parser.add_argument("run_dir", metavar="RUN", help="folder of the run")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the report. Raises ValueError for a folder without the files of a run."""
    from megatron_scalerl.report import report

    report(arguments.run_dir, console)
    return 0

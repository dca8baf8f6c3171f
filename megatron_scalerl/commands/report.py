"""`megatron-scalerl report RUN`: gain, cost and forecast of a run, and the page of the run as one file."""

import argparse
import json
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Report what a run gained on its held-out prompts, what it cost by role, and how the forecast from its first "
        "part compares with its last part. Writes RUN/forecast.png. With --html it writes the page of the run "
        "instead, a file that needs no network, or for a folder of runs a page that lists the runs. "
        "`megatron-scalerl watch RUN` shows the same page with all completions."
    )
    parser.epilog = "example:\n  megatron-scalerl report runs/my_run --html page.html"
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="folder of the run; with --html also a folder of runs"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page of the run to FILE, at most 25 MB")
    parser.add_argument("--json", metavar="OUT|-", help="write the page's numbers as JSON to OUT; - prints JSON")
    parser.add_argument(
        "--group",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="with --html: number of a group whose completions the page shows; may be repeated",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the report, or write the page or the numbers. Raises ValueError for a folder without a run, OSError for
    an unwritable file."""
    if arguments.json and (arguments.html or arguments.group):
        raise ValueError("--json writes numbers and no page; leave out --html and --group")
    if arguments.json:
        from megatron_scalerl.page.static_page import numbers

        text = json.dumps(numbers(arguments.run_dir), indent=2) + "\n"
        if arguments.json == "-":
            print(text, end="")
        else:
            Path(arguments.json).write_text(text)
        return 0
    if arguments.html is None:
        if arguments.group:
            raise ValueError("--group chooses completions for the page; add --html FILE")
        from megatron_scalerl.page.report import report

        report(arguments.run_dir, console)
        return 0
    from megatron_scalerl.page.find_runs import is_run

    is_single_run = is_run(arguments.run_dir)
    from megatron_scalerl.page.static_page import write_page, write_runs_page

    if not is_single_run:
        if arguments.group:
            raise ValueError(f"--group needs the folder of one run, and {arguments.run_dir} has several")
        count = write_runs_page(arguments.run_dir, arguments.html)
        console.print(f"page: {arguments.html}, with {count} runs")
        return 0
    groups, left_out = write_page(arguments.run_dir, arguments.html, group_ids=arguments.group)
    line = f"page: {arguments.html}, with {groups} groups"
    if left_out:
        line += f", {left_out} groups left out: no longer stored, unreadable, or too large for the page"
    console.print(line)
    return 0

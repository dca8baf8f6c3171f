"""`megatron-scalerl watch RUN`: the page of a run, or a list of runs, in a browser, while the runs write."""

import argparse
import asyncio
import signal
from pathlib import Path

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = (
        "Serve the page of a run on 127.0.0.1: learning curve and forecasts, steps, waits, cost, faults and every "
        "completion in its store. For a folder of runs, serve a list of all runs below the folder with state, step "
        "and last validation, and the page of each run. A page follows a run that writes; the list is read again "
        "when the browser loads the list. Nothing is written. Ctrl-C ends the command."
    )
    parser.epilog = "example:\n  megatron-scalerl watch runs/my_run"
    parser.add_argument("run_dir", type=Path, metavar="RUN", nargs="?", help="folder of the run, or folder of runs")
    parser.add_argument("--demo", action="store_true", help="show a small recorded run that comes with the package")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to serve at (default: any free port)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Serve until SIGINT or SIGTERM. Raises ValueError for a folder without a run, OSError for a port in use."""
    from megatron_scalerl.page.find_runs import is_run

    if (arguments.run_dir is None) != arguments.demo:
        raise ValueError("RUN: give either the folder of a run or --demo")
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port: {arguments.port} is not a port; take one up to 65535, or 0 for any free one")
    if arguments.demo:
        from megatron_scalerl.page.demo import recorded_run

        with recorded_run() as run_dir:
            asyncio.run(_serve(run_dir, True, arguments.port, console))
        return 0
    # the folder is checked before the server's packages are imported, so that a mistake is reported at once
    is_single_run = is_run(arguments.run_dir)
    asyncio.run(_serve(arguments.run_dir, is_single_run, arguments.port, console))
    return 0


async def _serve(folder: Path, is_single_run: bool, port: int, console: Console) -> None:
    from megatron_scalerl.page.server import PageServer, RunPage, RunsPage

    if is_single_run:
        server = PageServer(RunPage(folder))
    else:
        server = PageServer(RunsPage(folder))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server.serving(port):
        console.print(server.url)
        await stop.wait()

"""`megatron-scalerl engine --join RUN`: add an engine on this host to a run that another host's controller serves."""

import argparse
import asyncio
import os
import re
import socket
import sys
import time
from pathlib import Path

from rich.console import Console

EPILOG = """examples:
  megatron-scalerl engine --join runs/my_run              until the run ends, or SIGTERM
  megatron-scalerl engine --join runs/my_run --devices 2  with the first two GPUs that are visible

RUN is a folder that this host and the controller's host see. The engine serves once it has the current weights. An
engine that is evicted, or whose controller ends, is started again after a delay. The command ends when the run is
finished, or with exit code 1 when the engine has not been in the run for --wait-minutes."""

AGENT = (sys.executable, "-m", "megatron_scalerl.launch.agent")
"""Command that starts the engine's agent, which starts the engine once and ends with the engine."""
ATTEMPTS = "attempts.jsonl"
"""File with a run's attempts. `controller.run_folder` defines the name, too, but imports torch, and this process has
to stay small next to an engine."""
END = "end.json"
"""File of a run that says how the latest finished attempt ended."""
FIRST_DELAY_S = 1.0
"""Delay before the first restart in a row; every further restart doubles the delay (seconds)."""
LONGEST_DELAY_S = 60.0
"""Longest delay before a restart (seconds)."""
HEALTHY_S = 600.0
"""An agent that lived longer than this (seconds) resets the delay: the next failure counts as the first in a row."""
EXIT_GIVEN_UP = 1
"""Exit code if no controller of the run accepted the engine for --wait-minutes."""

_STOP_S = 30.0
"""Seconds that the agent has to end the server after SIGTERM; then the agent is killed."""
_HOST_CHARACTERS = 48
"""Most characters of the host's name in an engine's name."""
_ENDS = {
    0: "the controller stopped the engine",
    1: "the engine's server ended",
    3: "the controller disconnected",
    4: "no controller accepted the engine",
}
"""Exit code of the agent -> reason why the agent ended."""
_TAKEN_IN = (0, 3)
"""Exit codes of an agent whose engine was accepted by a controller before the agent ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.description = "Add an engine on this host to a run on several hosts."
    parser.epilog = EPILOG
    parser.add_argument("--join", metavar="RUN", required=True, help="folder of the run that gets the engine")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices of the engine (default: engine.devices_per_engine of the recipe)",
    )
    parser.add_argument(
        "--wait-minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="give up after M minutes in which the engine was not in the run (default: %(default)g)",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Keep one engine in the run until the run ends. Raises ValueError for wrong options, OSError for a run's
    unreadable recipe."""
    from megatron_scalerl.processes.signals import Stopped, run_until_signal
    from megatron_scalerl.recipe.file import load_recipe

    folder = Path(arguments.join).absolute()
    if not (folder / "recipe.yaml").is_file():
        raise ValueError(f"--join: {folder} is not the folder of a run: it has no recipe.yaml")
    devices = arguments.devices
    if devices is None:
        devices = load_recipe(str(folder / "recipe.yaml")).engine.devices_per_engine
    if arguments.wait_minutes <= 0:
        raise ValueError(f"--wait-minutes: {arguments.wait_minutes:g} is too short; take more than 0")
    if devices < 1:
        raise ValueError(f"--devices: {devices} is too few; take at least 1")
    name = engine_name()
    console.print(f"{name}: {devices} devices; log: {folder / 'logs' / name}.log")
    try:
        last = run_until_signal(_keep_joined(folder, name, devices, arguments.wait_minutes * 60, console))
    except Stopped as stopped:
        console.print(f"{name}: stopped by a signal")
        return stopped.exit_code
    if last:
        console.print(f"{name}: gave up after {arguments.wait_minutes:g} minutes outside of the run {folder}: {last}")
        return EXIT_GIVEN_UP
    console.print(f"{name}: the run is finished")
    return 0


def engine_name() -> str:
    """The engine's name in the run: extra-JOB-STEP on Slurm, else extra-HOST-PROCESS; the same for every restart."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:_HOST_CHARACTERS]
        return f"extra-{host}-{os.getpid()}"
    name = f"extra-{job}-{os.environ.get('SLURM_STEP_ID', '0')}"
    process = os.environ.get("SLURM_PROCID", "0")
    if process != "0":
        name += f".{process}"
    return name


def has_ended(folder: Path) -> bool:
    """True if the newest attempt finished the run. A run that only an earlier attempt finished was extended, and goes
    on."""
    from megatron_scalerl.checkpoints.jsonl import read_jsonl

    attempts, ends = ([row["incarnation"] for row in read_jsonl(folder / file)] for file in (ATTEMPTS, END))
    # slices are compared, because `ends` has no last element before the run has ended
    return bool(attempts) and attempts[-1:] == ends[-1:]


async def _keep_joined(folder: Path, name: str, devices: int, wait_s: float, console: Console) -> str:
    """Start the engine's agent, and start a new agent whenever an agent ends. Returns an empty text after the run's
    end.

    If no controller accepted the engine for `wait_s` seconds, returns the reason why the last agent ended.
    """
    from megatron_scalerl.launch.control_folder import read_controller
    from megatron_scalerl.processes.child_process import ChildProcess

    variables = os.environ | {"MSRL_START": "", "MSRL_DEVICES": str(devices)}
    failures = 0
    in_run = time.monotonic()
    end_text = ""
    while time.monotonic() - in_run < wait_s:
        started = time.monotonic()
        try:
            if has_ended(folder):
                return ""
            env = variables | read_controller(folder)
            agent = await ChildProcess.start(name, [*AGENT, name], env, folder / "logs" / f"{name}.log")
        except (ValueError, OSError) as error:
            # a shared file system may fail for some time, or show half a line
            end_text = str(error)
        else:
            try:
                code = await agent.wait()
            finally:
                await agent.stop(_STOP_S)
            end_text = _ENDS.get(code, f"exited with code {code}")
            if code in _TAKEN_IN or time.monotonic() - started > HEALTHY_S:
                in_run = time.monotonic()
        if time.monotonic() - started > HEALTHY_S:
            failures = 0
        failures += 1
        # the exponent is bounded, since 2 ** 1024 does not fit in a float
        delay = min(FIRST_DELAY_S * 2 ** min(failures - 1, 10), LONGEST_DELAY_S)
        console.print(f"{name}: {end_text}; the next attempt to join is in {delay:g} s")
        await asyncio.sleep(delay)
    return end_text

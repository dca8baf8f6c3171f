"""A controller with stand-in children, for tests that stop it from outside: `controller.py PIDS LOGS [GRACE_S]`."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from stand_ins import stand_in

from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.signals import Stopped, run_until_signal


async def run(pids, logs, grace_s):
    children = []
    try:
        for name in ("first", "second"):
            children.append(await ChildProcess.start(name, stand_in(pids), dict(os.environ), logs / name))
        await asyncio.Event().wait()
    finally:
        print("stopping", flush=True)
        for end in await asyncio.gather(*(child.stop(grace_s) for child in children), return_exceptions=True):
            assert end is None, end
        print("stopped gracefully", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(IndexError):
        grace = 0.3
        grace = float(sys.argv[3])
    try:
        run_until_signal(run(Path(sys.argv[1]), Path(sys.argv[2]), grace))
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)

"""A controller with stand-in children, for tests that stop it from outside: `controller.py PIDS LOGS [GRACE_S]`."""

import asyncio
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
    pids, logs, *grace = sys.argv[1:]
    try:
        run_until_signal(run(Path(pids), Path(logs), float(*grace or [0.3])))
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)

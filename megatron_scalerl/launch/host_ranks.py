"""The trainer's ranks on a host other than the controller's: `python -m megatron_scalerl.launch.host_ranks`.

Environment: what `trainer.worker` reads, but MSRL_RANKS (FIRST:COUNT) in place of RANK and MSRL_SECRET_FILE in place
of MSRL_SECRET; the files are on a folder that all hosts see. A shared file system may show the secret of an earlier
start of the controller for a while: the file is read until its secret gives the controller's public key,
MSRL_CONTROLLER_KEY.

It starts the host's ranks as child processes and waits for them. When one fails the others are ended, and this
process exits with 1 and names the one that failed first. SIGTERM ends all. The ranks die with this process, and exit
by themselves when the controller disconnects: none of them is left behind, whatever becomes of the connection over
which this program was started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_scalerl.distributed.rendezvous import own_address
from megatron_scalerl.distributed.sockets import Purpose, controller_key
from megatron_scalerl.launch.own_share import SHARE, own_variables, share_of
from megatron_scalerl.processes.child_process import ChildProcess, log_end
from megatron_scalerl.processes.logs import log_to_stderr
from megatron_scalerl.processes.secret_file import read_secret
from megatron_scalerl.processes.signals import Stopped, run_until_signal
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.client import BLAME_S

logger = logging.getLogger("megatron_scalerl.launch.host_ranks")  # also where this module is __main__

_OTHERS_S = BLAME_S + 20.0
"""Seconds for the host's other ranks to exit by themselves after the failure of one: most when they lose its
connection, the rest with the controller's, which may be held up. After that they are ended."""
SECRET_S, _READ_AGAIN_S = 60.0, 2.0
"""Seconds in which the secret of this start of the controller must appear, and between two looks."""


async def serve() -> int:
    """Start the ranks and wait until all have exited; the exit code. Raises ValueError and OSError for the secret."""
    first, count = map(int, os.environ["MSRL_RANKS"].split(":"))
    controller = os.environ["MSRL_CONTROLLER"].removeprefix("tcp://").rpartition(":")[0].strip("[]")
    env = {"MSRL_SECRET": await _secret(Path(os.environ["MSRL_SECRET_FILE"]), os.environ["MSRL_CONTROLLER_KEY"])}
    if first == 0:
        env["MSRL_BIND_HOST"] = own_address(controller)
    threads = load_recipe(os.environ["MSRL_RECIPE"]).trainer.threads
    ranks: list[ChildProcess] = []
    try:
        for number in range(count):
            log = Path(os.environ["MSRL_LOGS"]) / f"trainer-{first + number}.log"
            share = share_of([number], int(os.environ.get(SHARE, count)))
            ranks.append(
                await start_rank(env, rank=first + number, local_rank=number, threads=threads, log=log, share=share)
            )
        exits = {asyncio.create_task(rank.wait()): rank for rank in ranks}
        for task in asyncio.as_completed(exits):
            await task
            failed = [rank for done, rank in exits.items() if done.done() and done.result() != 0]
            if failed:
                code = next(done.result() for done, rank in exits.items() if rank is failed[0])
                logger.error("%s exited with code %d%s", failed[0].name, code, log_end(failed[0].log))
                # the controller names a rank that exits unheard, which one that is ended here would do
                await asyncio.wait(exits, timeout=_OTHERS_S)
                return 1
        return 0
    finally:
        await asyncio.gather(*(rank.stop() for rank in ranks))


async def _secret(path: Path, key: str) -> str:
    """The secret of the controller with this public key. Raises ValueError and OSError where it does not appear."""
    end = time.monotonic() + SECRET_S
    while True:
        problem: Exception
        try:
            secret = read_secret(path)
            if controller_key(secret, Purpose.TRAINER) == key:
                return secret
            problem = ValueError(
                f"{path}: expected the secret of the controller that started this, found another one"
            )
        except (ValueError, OSError) as error:
            problem = error
        if time.monotonic() > end:
            raise problem
        await asyncio.sleep(_READ_AGAIN_S)


def main() -> int:
    """Run the ranks of this host. Returns the exit status."""
    log_to_stderr()
    try:
        return run_until_signal(serve())
    except Stopped as stopped:
        return stopped.exit_code
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1


async def start_rank(
    env: Mapping[str, str], *, rank: int, local_rank: int, threads: int, log: Path, share: str = ""
) -> ChildProcess:
    """Start a rank on this host, which joins the trainer that `env` names.

    env: what `trainer.worker` reads but for the two numbers, and MSRL_RECIPE; it takes precedence over this
    process's environment. local_rank: its number on this host. threads: trainer.threads. log: its output.
    share: of the host (`own_share`).
    """
    numbers = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "OMP_NUM_THREADS": str(threads),
        # Megatron-Core warns at every import that Transformer Engine and apex are not installed
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
    }
    argv = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]
    return await ChildProcess.start(
        f"trainer-{rank}", argv, {**os.environ, **env, **numbers, **own_variables(f"trainer-{rank}", share)}, log
    )


if __name__ == "__main__":
    sys.exit(main())

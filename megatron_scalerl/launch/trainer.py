"""Starts, watches and stops the trainer's ranks of one attempt.

On the controller's host each rank is a child process of the controller. On another host all ranks are children of one
program (`launch.agent`), which is started by a command. With GPUs, a host's ranks use the first visible GPUs
(`launch.placement`).
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import NoReturn

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.distributed.sockets import LOCAL, Purpose
from megatron_scalerl.launch.agent import start_ranks
from megatron_scalerl.launch.control_folder import public_environment, start_agent
from megatron_scalerl.launch.hosts import Hosts
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.processes.child_process import ChildProcess, cancelled, stop_all
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import BLAME_S, TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.trainer.ranks import environment as environment_of_ranks

logger = logging.getLogger(__name__)

_EXIT_S = 10.0
"""Seconds for processes to exit by themselves when the ranks are stopped. Afterwards processes get signals. The
command that starts ranks on another host (ssh, srun) would report a failure after a signal."""
_STOP_S = 60.0
"""Seconds for all ranks to leave torch's process groups and answer the controller, once the run is finished."""


class TrainerRanks:
    """The ranks of one attempt. The caller calls `start`, uses `client` while `watch` waits, then calls `stop`."""

    def __init__(self, recipe: Recipe, attempt: Attempt, client: TrainerClient, hosts: Hosts, placement: Placement):
        self.client = client
        self._recipe = recipe
        self._attempt = attempt
        self._hosts = hosts
        self._placement = placement
        self._children: list[ChildProcess] = []
        self._elsewhere: set[str] = set()
        """Names of the child processes (ssh, srun) that start ranks on other hosts."""
        # One task for each child process. A task raises ProcessDied once the child process has exited.
        self._watches: list[asyncio.Task[NoReturn]] = []
        self._started = asyncio.Event()

    async def start(self) -> TrainerInfo:
        """Start all ranks and wait until all are ready. Raises the first failure."""
        logs = self._attempt.folder / "logs"
        joining = self.client.worker_env(0)
        public = public_environment(self._attempt, self.client.endpoint, joining["MSRL_SECRET"], Purpose.TRAINER)
        public["WORLD_SIZE"] = joining["WORLD_SIZE"]
        for name, value in environment_of_ranks(self._recipe).items():
            # A value in the user's environment takes precedence over the recipe's value.
            public[name] = os.environ.get(name, value)
        # All hosts get the same variables except MSRL_RANKS, the numbers of the host's ranks.
        for ranks in self._placement.trainer:
            public["MSRL_RANKS"] = f"{ranks.first}:{ranks.count}"
            if ranks.host.here:
                environment = joining | public
                if self._hosts.address is not None:
                    environment["MSRL_BIND_HOST"] = self._hosts.address
                async for child in start_ranks(environment, logs, self._recipe.trainer.threads):
                    self._add(child)
            else:
                name = f"trainer-{ranks.host.name}"
                self._elsewhere.add(name)
                self._add(await start_agent(self._hosts, ranks.host, name, public, logs / f"{name}.log"))
        self._started.set()
        return await self.client.wait_ready(self._recipe.trainer.start_timeout_s)

    def _add(self, child: ChildProcess) -> None:
        self._children.append(child)
        self._watches.append(asyncio.create_task(child.watch(), name=child.name))

    async def watch(self) -> NoReturn:
        """Wait until a rank has exited, then raise ProcessDied."""
        await self._started.wait()
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        # Meanwhile the failed rank's last message, which has the reason, reaches the calls that wait for answers.
        await asyncio.wait(self._watches, return_when=asyncio.ALL_COMPLETED, timeout=BLAME_S + 1.0)
        next(watch for watch in self._watches if watch.done()).result()

    async def stop(self, *, graceful: bool) -> None:
        """Stop all ranks. A failure to stop a rank is logged as one line, and the remaining ranks are still stopped.

        graceful: True to let the ranks leave torch's process groups first.
        """
        await cancelled(*self._watches)
        try:
            if graceful:
                async with asyncio.timeout(_STOP_S):
                    await self.client.stop()
        # After a graceful stop the run is finished and on disk, so a failure to stop is only logged.
        except (RuntimeError, OSError) as error:
            reason = str(error) or f"no answer within {_STOP_S:g} s"
            logger.warning("the run is finished, but its trainer did not stop gracefully: %s", reason)
        finally:
            # Ranks that are still running exit when the connection is closed.
            self.client.close()
            leaving = [child for child in self._children if graceful or child.name in self._elsewhere]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await asyncio.gather(*(child.wait() for child in leaving))
            await stop_all(self._children)


@contextlib.asynccontextmanager
async def trainer_ranks(
    recipe: Recipe, attempt: Attempt, secret: str, hosts: Hosts, placement: Placement
) -> AsyncIterator[TrainerRanks]:
    """The trainer's ranks of one attempt. After the block the ranks are stopped, gracefully if nothing was raised."""
    with contextlib.ExitStack() as stack:
        address = hosts.address
        client = TrainerClient(
            world_size=recipe.trainer.world_size,
            run_id=attempt.run_id,
            incarnation=attempt.incarnation,
            secret=secret,
            rendezvous=None if address else stack.enter_context(private_folder()),
            address=address or LOCAL,
            command_timeout_s=recipe.trainer.step_timeout_s,
        )
        trainer = TrainerRanks(recipe, attempt, client, hosts, placement)
        try:
            yield trainer
        except BaseException:
            await trainer.stop(graceful=False)
            raise
        await trainer.stop(graceful=True)

"""The trainer's ranks of one attempt: started, watched and stopped.

On the controller's host each rank is its child process; on another one all of them are children of one program
(`launch.host_ranks`), which is started by a command. With GPUs, a host's ranks use its first visible ones
(`launch.placement`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.distributed.sockets import LOCAL, Purpose, controller_key
from megatron_scalerl.launch import host_ranks
from megatron_scalerl.launch.control_folder import secret_file
from megatron_scalerl.launch.hosts import Hosts
from megatron_scalerl.launch.own_share import SHARE, share_of
from megatron_scalerl.launch.placement import Attempt, HostRanks, Placement
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import BLAME_S, TrainerClient
from megatron_scalerl.trainer.messages import TrainerInfo
from megatron_scalerl.trainer.ranks import environment

logger = logging.getLogger(__name__)

_EXIT_S = 10.0
"""Seconds in which processes that are about to exit may do so by themselves: a signal would reach ranks on another
host by way of the command that started them, which reports it as a failure."""
_STOP_S = 60.0
"""Seconds for all ranks to leave their process groups and answer, once the run is finished."""
_NOT_FOR_OTHER_HOSTS = ("RANK", "MSRL_SECRET")
"""Variables of a rank that the command line of a program on another host must not have."""


class TrainerRanks:
    """The ranks of one attempt. `start`, then use `client` while `watch` waits, then `stop`."""

    def __init__(
        self, recipe: Recipe, attempt: Attempt, client: TrainerClient, hosts: Hosts, placement: Placement
    ) -> None:
        self.client = client
        self._recipe, self._attempt = recipe, attempt
        self._hosts, self._placement = hosts, placement
        self._children: list[ChildProcess] = []
        self._elsewhere: set[str] = set()
        """Names of the children that start ranks on other hosts."""
        self._watches: list[asyncio.Task[NoReturn]] = []  # one per child; each ends by raising
        self._started = asyncio.Event()

    async def start(self) -> TrainerInfo:
        """Start all ranks and wait until they are ready. Raises the first failure."""
        for ranks in self._placement.trainer:
            if ranks.host.here:
                for number in range(ranks.count):
                    share = share_of([number], ranks.of or ranks.count)
                    self._add(await self._start_here(ranks.first + number, local_rank=number, share=share))
            else:
                self._add(await self._start_there(ranks))
        self._started.set()
        return await self.client.wait_ready(self._recipe.trainer.start_timeout_s)

    async def _exits(self, children: Sequence[ChildProcess]) -> None:
        """Wait until these have exited, _EXIT_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await asyncio.gather(*(child.wait() for child in children))

    def _add(self, child: ChildProcess) -> None:
        self._children.append(child)
        self._watches.append(asyncio.create_task(child.watch(), name=child.name))

    async def _start_here(self, rank: int, *, local_rank: int, share: str) -> ChildProcess:
        bind = {"MSRL_BIND_HOST": self._hosts.address} if self._hosts.address and rank == 0 else {}
        return await start_rank(
            self._recipe,
            self.client,
            rank=rank,
            local_rank=local_rank,
            recipe_file=self._attempt.recipe_file,
            log=self._attempt.folder / "logs" / f"trainer-{rank}.log",
            env=bind,
            share=share,
        )

    async def _start_there(self, ranks: HostRanks) -> ChildProcess:
        name, logs = f"trainer-{ranks.host.name}", (self._attempt.folder / "logs").absolute()
        self._elsewhere.add(name)
        joining = self.client.worker_env(0)
        env = {name: value for name, value in joining.items() if name not in _NOT_FOR_OTHER_HOSTS}
        env |= _before_cuda(self._recipe) | {
            "MSRL_RANKS": f"{ranks.first}:{ranks.count}",
            "MSRL_SECRET_FILE": str(secret_file(self._attempt.folder)),
            "MSRL_CONTROLLER_KEY": controller_key(joining["MSRL_SECRET"], Purpose.TRAINER),
            "MSRL_RECIPE": str(self._attempt.recipe_file.absolute()),
            "MSRL_LOGS": str(logs),
            SHARE: str(ranks.of),
            NAME_VARIABLE: name,
        }
        argv = [sys.executable, "-m", "megatron_scalerl.launch.host_ranks"]
        command = self._hosts.command(ranks.host, argv, env)
        return await ChildProcess.start(name, command, os.environ, logs / f"{name}.log")

    async def watch(self) -> NoReturn:
        """Wait until a rank has exited, then raise ProcessDied."""
        await self._started.wait()
        await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        # its last message, which says why, reaches whoever waits for an answer by then
        await asyncio.wait(self._watches, return_when=asyncio.ALL_COMPLETED, timeout=BLAME_S + 1.0)
        next(watch for watch in self._watches if watch.done()).result()

    async def stop(self, *, graceful: bool) -> None:
        """Stop every rank, whatever fails meanwhile; each failure is logged as a one-line warning.

        graceful: let the ranks leave their process groups first.
        """
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        try:
            if graceful:
                async with asyncio.timeout(_STOP_S):
                    await self.client.stop()
        except (RuntimeError, OSError) as error:  # the run is finished and on disk
            reason = str(error) or f"no answer within {_STOP_S:g} s"
            logger.warning("the run is finished, but its trainer did not stop gracefully: %s", reason)
        finally:
            self.client.close()  # ranks that have not exited do so now
            await self._exits(
                self._children if graceful else [c for c in self._children if c.name in self._elsewhere]
            )
            results = await asyncio.gather(*(child.stop() for child in self._children), return_exceptions=True)
            for child, failure in zip(self._children, results):
                if isinstance(failure, BaseException):
                    logger.warning("%s could not be stopped: %s", child.name, str(failure) or type(failure).__name__)


async def start_rank(
    recipe: Recipe,
    client: TrainerClient,
    *,
    rank: int,
    recipe_file: Path,
    log: Path,
    local_rank: int | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    share: str = "",
) -> ChildProcess:
    """Start one trainer rank on this host, which reads `recipe_file` and connects to `client`.

    local_rank: None for `rank`. env: further variables. share: of the host (`own_share`).
    """
    return await host_ranks.start_rank(
        {**_before_cuda(recipe), **client.worker_env(rank), **env, "MSRL_RECIPE": str(recipe_file)},
        rank=rank,
        local_rank=rank if local_rank is None else local_rank,
        threads=recipe.trainer.threads,
        log=log,
        share=share,
    )


def _before_cuda(recipe: Recipe) -> dict[str, str]:
    """What a rank's CUDA has to find in its environment: as this process has it, else as `environment` says."""
    return {name: os.environ.get(name, value) for name, value in environment(recipe).items()}


@contextlib.asynccontextmanager
async def trainer_ranks(
    recipe: Recipe, attempt: Attempt, secret: str, hosts: Hosts, placement: Placement
) -> AsyncIterator[TrainerRanks]:
    """The trainer of one attempt, stopped on exit from the block, gracefully if nothing was raised."""
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

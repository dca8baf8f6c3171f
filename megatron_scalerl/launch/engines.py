"""The engines of a run: started, watched, ended when they are evicted, and started again, on whichever host.

    start: _start --> _until_evicted --> _restart: stop, delay, _start --> _until_evicted ...
                                             '--> given up: its supervisor ends

One supervisor task per engine (`_supervise`). Consumes: exits, stalls and evictions of the engine. Waits for: such an
event; then for the end of the engine's processes, for the delay, and for the new server. Unblocked by: the watchdog
(`engine.watchdog`), or whoever evicts the engine (`engine.membership`). Ends when the engine is given up.

With several hosts there are two tasks more. The first reads the socket to the agents (`launch.agents`). The second
takes in engines that join (`_take_in`), and serves each engine in a task until the engine is evicted or leaves
(`_serve_joined`). The run does not start such an engine again: the engine's host does (`commands.engine`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from megatron_scalerl.distributed.rendezvous import LOOPBACK
from megatron_scalerl.engine.membership import Member, Membership
from megatron_scalerl.engine.watchdog import LagClock
from megatron_scalerl.launch.agent import Hello
from megatron_scalerl.launch.agents import Agents
from megatron_scalerl.launch.hosts import Hosts
from megatron_scalerl.launch.local_server import STOP_S
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.launch.process import EngineProcess
from megatron_scalerl.processes.child_process import LOG_END, cancelled, fatal_error, race, stop_all
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
"""Delay before the first restart in a row (seconds); doubles with each further restart."""
LONGEST_DELAY_S = 60.0
"""Longest delay before a restart (seconds)."""
HEALTHY_S = 600.0
"""An engine's count of restarts is set to 0 after the engine has run for this time (seconds) plus the longest time
limit within which a fault is found."""
MOST_BARREN = 2
"""An engine is given up after so many starts in a row in which the engine died with requests, while no engine of the
run has ever completed a request. Such deaths are no chance, and each further start would take minutes."""
UNREACHED_S = 600.0
"""Seconds for which failed starts on an unreachable host do not count as restarts: the host may be booting."""


class Engines:
    """The engines of one run. Call `start`, then `watch`, then `stop`."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        placement: Placement,
        hosts: Hosts,
        attempt: Attempt,
        secret: str,
        record: Callable[[Member], None] = lambda member: None,
    ):
        """attempt: the run's folder, and the ids by which agents of this start of the controller are recognized.

        Binds the servers' addresses on this host. With several hosts, also binds the socket to the agents, which
        needs a running event loop. Raises ValueError for a port in use and for options unknown to vLLM.
        """
        engine = recipe.engine
        self._names = [*recipe.engine_devices]
        teachers = {name: recipe.engine_devices[name] for name in self._names[engine.count :]}
        self.members = Membership(
            engine.count,
            minimum=engine.min_engines,
            devices=engine.charged_devices,
            teachers=teachers,
            record=record,
        )
        self._recipe = recipe
        self._places = (*placement.engines, *placement.teachers)
        self._hosts = hosts
        self._secret = secret
        self._logs = attempt.folder / "logs"
        self._lag = LagClock(recipe.engine)
        self._agents: Agents | None = None
        if hosts.address is not None:
            self._agents = Agents(
                recipe, hosts=hosts, attempt=attempt, secret=secret, objection=self._objection_to_joining
            )
        self._processes = [self._make(index) for index in range(len(self._names))]
        # The tasks that read the socket and take in engines that join.
        self._agent_tasks: list[asyncio.Task[NoReturn]] = []
        self._completed = False
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all engines. Every engine is stale then: no weights of the trainer have arrived yet.

        Raises the first failure, since a first start is not repeated.
        """
        if self._agents is not None:
            self._agent_tasks = [
                asyncio.create_task(self._agents.serve(), name="agents"),
                asyncio.create_task(self._take_in(self._agents), name="joining"),
            ]
            self._agents.announce()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._processes)):
                tasks.create_task(self._start(index), name=f"engine-{index}")
        self._supervisors = [
            asyncio.create_task(self._supervise(index), name=f"engine-{index}")
            for index in range(len(self._processes))
        ]

    async def watch(self) -> NoReturn:
        """Wait until fewer engines than engine.min_engines are left, then raise EngineDied.

        Also raises the error of a supervisor that failed: no other task would end or restart the supervisor's engine.
        """
        too_few = asyncio.create_task(self.members.too_few())
        try:
            done, _ = await asyncio.wait(
                {too_few, *self._supervisors, *self._agent_tasks}, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
        finally:
            await cancelled(too_few)
        raise AssertionError("too_few raises")

    async def stop(self) -> None:
        """Stop every process, whatever fails meanwhile; each failure is logged as a one-line warning."""
        await cancelled(*self._supervisors, *self._agent_tasks[1:])
        await stop_all(self._processes)
        # The socket's reader is cancelled last, since the reader gets the agents' answers.
        await cancelled(*self._agent_tasks)
        if self._agents is not None:
            self._agents.close()

    def _make(self, index: int) -> EngineProcess:
        place = self._places[index]
        name = self._names[index]
        recipe = self._recipe.of_engine(name)
        interface = LOOPBACK if self._agents is None else self._agents.interface
        if not place.host.here:
            assert self._agents is not None, place
            server = self._agents.engine(index, name, place, recipe.engine.devices_per_engine)
            return EngineProcess(recipe, server, secret=self._secret)
        return EngineProcess.local(
            recipe,
            index=index,
            name=name,
            secret=self._secret,
            log_path=self._logs / f"{name}.log",
            positions=place.positions,
            interface=interface,
        )

    async def _start(self, index: int) -> None:
        process = self._processes[index]
        self.members.start(index)
        await process.start()
        self.members.join(index, process.client)

    async def _supervise(self, index: int) -> None:
        """Keep an engine running until the engine is given up."""
        # A fault at the start is found within the longest limit, so an engine that ran for longer had none.
        engine = self._recipe.engine
        limits = (engine.stall_timeout_s, engine.first_token_timeout_s, self._recipe.weights.timeout_s)
        healthy_s = HEALTHY_S + max(limits)
        failures = 0
        barren_starts = 0
        start_time = time.monotonic()
        while True:
            reason = await self._until_evicted(self._processes[index])
            barren_starts += 1
            # An engine that had no request has not failed at work, so the end does not count as barren.
            if not self._processes[index].client.ended_generations or self._completes:
                barren_starts = 0
            if barren_starts == MOST_BARREN:
                reason = f"{reason}; given up: no engine completed a request in its last {barren_starts} starts"
                failures = engine.max_restarts  # so that no restart follows
            elif time.monotonic() - start_time > healthy_s:
                failures = 0
            failures += 1
            loss_time = time.monotonic()
            delay = FIRST_DELAY_S * 2 ** (failures - 1)
            while not await self._restart(index, failures, reason, delay=min(delay, LONGEST_DELAY_S)):
                if self.members.members[index].given_up:
                    return
                if self._processes[index].server.reached or time.monotonic() - loss_time > UNREACHED_S:
                    failures += 1
                reason = self.members.members[index].reason
                delay *= 2
            start_time = time.monotonic()

    @property
    def _completes(self) -> bool:
        """Whether any engine of the run has ever completed a request."""
        self._completed |= any(process.client.received_tokens for process in self._processes)
        return self._completed

    async def _until_evicted(self, process: EngineProcess) -> str:
        """Wait until the engine fails or is evicted, and return the reason. An engine that fails is evicted."""
        # A teacher does other work than the engines, so its rate cannot be compared.
        lag = None if self.members.teacher(process.name) else self._lag
        async with race(process.watch(lag), self.members.evicted(process.client)) as (watch, evicted):
            error = watch.exception() if watch.done() else None
            if error is None:
                return _with_cause(await evicted, process)
            reason = _with_cause(str(error), process)
            self.members.evict(process.client, reason)
            return reason

    async def _restart(self, index: int, failures: int, reason: str, *, delay: float) -> bool:
        """End what is left of an engine's server, and start another server after `delay` seconds.

        Returns False for an engine that is given up and for a failed start. An engine whose processes do not end, and
        so hold devices, is given up.
        """
        process = self._processes[index]
        logger.warning("%s is evicted: %s", process.name, reason)
        given_up = failures > self._recipe.engine.max_restarts
        host_gone = not process.server.reached
        host = self._places[index].host.name
        if host_gone and host in await asyncio.to_thread(self._hosts.have_left):
            given_up = True
            reason = f"Slurm removed its host from the job ({reason})"
        try:
            await process.stop(0.0)  # SIGKILL at once: the server may hang, and has nothing worth saving
        except (RuntimeError, OSError) as error:
            given_up = True
            host_gone = False
            reason = str(error)
        self._lag.forget(process.name)
        self.members.lose(index, reason, given_up=given_up, host_gone=host_gone)
        if given_up:
            return False
        await asyncio.sleep(delay)
        try:
            self._processes[index] = self._make(index)
            await self._start(index)
        except (RuntimeError, ValueError, OSError) as error:
            self.members.lose(index, str(error))
            return False
        return True

    async def _take_in(self, agents: Agents) -> NoReturn:
        """Serve every engine that joins. Reads the queue `agents.joining`, and waits for nothing else."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                server = await agents.joining.get()
                # Two agents of the same name were in the queue, and the first is in the run.
                if self._in_run(server.name):
                    await server.forget()
                    continue
                index = self.members.add(server.name, server.hello.result().devices)
                process = EngineProcess(self._recipe, server, secret=self._secret)
                tasks.create_task(self._serve_joined(index, process), name=server.name)
        raise AssertionError("_take_in can end only by cancellation")

    async def _serve_joined(self, index: int, process: EngineProcess) -> None:
        """Use an engine that has joined, until the engine is evicted or leaves."""
        reason = "the run ends"
        grace_s = STOP_S
        devices = self.members.members[index].devices
        logger.info("%s joins from %s with %d devices", process.name, process.server.location, devices)
        try:
            await process.start()
            self.members.join(index, process.client)
            reason = await self._until_evicted(process)
            grace_s = 0.0
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error)
        finally:
            await stop_all([process], grace_s)
            self._lag.forget(process.name)
            self.members.lose(index, reason)
            logger.warning("%s has left: %s", process.name, reason)

    def _in_run(self, name: str) -> bool:
        """Whether an engine of this name has devices in the run."""
        return any(member.name == name and member.devices for member in self.members.members)

    def _objection_to_joining(self, hello: Hello) -> str | None:
        """The reason why this engine may not join now; None if the engine may join."""
        if self._recipe.rollouts.deterministic:
            return "rollouts.deterministic: the run keeps the engines that it started with, and none may join"
        if self._in_run(hello.name):
            return f"{hello.name}: the run already has an engine of this name; wait until it has left"
        return None


def _with_cause(error: str, process: EngineProcess) -> str:
    """The first line of an error with the last fatal error in the engine's log.

    Returns the error unchanged if the log has no fatal error.
    """
    # vLLM's server only says that the core has died. The core wrote the cause into the log that both processes share.
    cause = fatal_error(process.server.log_path)
    if not cause:
        return error
    line = error.splitlines()[0].partition(LOG_END)[0]
    return f"{line}; the last error in its log: {cause}"

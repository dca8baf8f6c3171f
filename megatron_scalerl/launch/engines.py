"""Starts, watches and restarts the engines of a run, on this host and on other hosts. An evicted engine is ended.

    start: _start --> _until_evicted --> _restart: stop, delay, _start --> _until_evicted ...
                                             '--> given up: the supervisor ends

One supervisor task per engine (`_supervise`). Consumes: exits, stalls and evictions of the engine. Waits for: an
exit, stall or eviction; then for the end of the engine's processes, for the delay, and for the new server. Unblocked
by: the server's exit, the watchdog (`engine.watchdog`), or an eviction (`engine.membership`). Ends when the engine is
given up.

With several hosts there are two more tasks. The first reads the socket to the agents (`launch.agents`). The second
takes in engines that join (`_take_in`), and serves each engine in a task until the engine is evicted or leaves
(`_serve_joined`). After a failure, an engine that joined is started again by its own command (`commands.engine`).
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
"""Delay before an engine's first restart (seconds). Doubles with each further restart in a row."""
LONGEST_DELAY_S = 60.0
"""Longest delay before a restart (seconds)."""
HEALTHY_S = 600.0
"""Seconds after which a running engine counts as healthy, so that the count of restarts begins at 0 again. The
longest time limit of the watchdog is added, since a fault may take so long to be found."""
MOST_BARREN = 2
"""Number of starts in a row after which an engine is given up if the engine died with requests each time, and no
engine of the run has ever completed a request. A further start would take minutes and fail likewise."""
UNREACHED_S = 600.0
"""Seconds for which failed starts on an unreachable host do not count as restarts, since the host may be booting."""


class Engines:
    """The engines of one run. The caller calls `start`, then `watch`, and `stop` at the end."""

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
        """attempt: the run's folder, and the ids by which the controller recognizes agents. record: called with an
        engine's entry (`Member`) whenever the entry changes.

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
        # Two tasks: the first reads the socket to the agents, the second takes in engines that join.
        self._agent_tasks: list[asyncio.Task[NoReturn]] = []
        self._completed = False
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all engines. Until the first weight update all engines are stale, that is, without current weights.

        Raises the first failure: the first start of an engine is not tried again.
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

        Also raises the error of a supervisor task that failed, since nothing else would restart the engine.
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
        """Stop the processes of all engines. If this fails for an engine, the failure is logged."""
        await cancelled(*self._supervisors, *self._agent_tasks[1:])
        await stop_all(self._processes)
        # The task that reads the socket is cancelled last, because `stop_all` waits for answers of agents.
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
        # An engine that has run for longer than the longest time limit of the watchdog had no fault from the start.
        engine = self._recipe.engine
        limits = (engine.stall_timeout_s, engine.first_token_timeout_s, self._recipe.weights.timeout_s)
        healthy_s = HEALTHY_S + max(limits)
        failures = 0
        barren_starts = 0
        start_time = time.monotonic()
        while True:
            reason = await self._until_evicted(self._processes[index])
            barren_starts += 1
            # Counted are starts in a row that lost requests, while no engine of the run has ever completed a request.
            if not self._processes[index].client.ended_generations or self._completes:
                barren_starts = 0
            if barren_starts == MOST_BARREN:
                reason = f"{reason}; given up: no engine completed a request in its last {barren_starts} starts"
                failures = engine.max_restarts  # so that `_restart` gives the engine up
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
        # A teacher does not generate as engines do, so the rates of a teacher and an engine cannot be compared.
        lag = None if self.members.teacher(process.name) else self._lag
        async with race(process.watch(lag), self.members.evicted(process.client)) as (watch, evicted):
            error = watch.exception() if watch.done() else None
            if error is None:
                return _with_cause(await evicted, process)
            reason = _with_cause(str(error), process)
            self.members.evict(process.client, reason)
            return reason

    async def _restart(self, index: int, failures: int, reason: str, *, delay: float) -> bool:
        """End the processes of an evicted engine, and start a server after `delay` seconds. True if the server is up.

        failures: number of failures in a row. The engine is given up after more than engine.max_restarts failures, if
        Slurm has removed the host, or if the engine's processes do not end and so may still hold devices.
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
            await process.stop(0.0)  # SIGKILL at once: the server may hang, and need not save anything
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
        """Add every engine in the queue `agents.joining` to the run, and serve each engine in a task."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                server = await agents.joining.get()
                # Two agents with one name were in the queue. The first agent's engine is in the run already.
                if self._in_run(server.name):
                    await server.forget()
                    continue
                index = self.members.add(server.name, server.hello.result().devices)
                process = EngineProcess(self._recipe, server, secret=self._secret)
                tasks.create_task(self._serve_joined(index, process), name=server.name)
        raise AssertionError("_take_in can end only by cancellation")

    async def _serve_joined(self, index: int, process: EngineProcess) -> None:
        """Start the server of an engine that joins; after an eviction or a failure, remove the engine from the
        run."""
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
            logger.warning("%s has left the run: %s", process.name, reason)

    def _in_run(self, name: str) -> bool:
        """Whether an engine of this name is in the run. The entry of an engine that has left has 0 devices."""
        return any(member.name == name and member.devices for member in self.members.members)

    def _objection_to_joining(self, hello: Hello) -> str | None:
        """The reason why this engine may not join now; None if the engine may join."""
        if self._recipe.rollouts.deterministic:
            return "rollouts.deterministic: the run keeps the engines that it started with, and none may join"
        if self._in_run(hello.name):
            return f"{hello.name}: the run already has an engine of this name; wait until it has left"
        return None


def _with_cause(error: str, process: EngineProcess) -> str:
    """The first line of an error message, followed by the last fatal error in the engine's log.

    Returns the error message unchanged if the log has no fatal error.
    """
    # vLLM's API server only reports that the engine core died. The core has written the cause to the shared log.
    cause = fatal_error(process.server.log_path)
    if not cause:
        return error
    line = error.splitlines()[0].partition(LOG_END)[0]
    return f"{line}; the last error in its log: {cause}"

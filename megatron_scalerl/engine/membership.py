"""Records which engines take work: the state of each engine, and an epoch that every change of a state increments.

If an engine that serves gets a new policy version, the state does not change.

    starting --> stale --> serving --> draining --> lost --> starting ...
                 | ^         | |           ^
                 | '-- held <' '---------. |
                 '-----------------------'-'

The launcher (`launch.engines`) reports starts and ends of processes, and engines that join and leave. The weight
update (`controller.weight_sync`) reports which engines hold the current policy version. Whoever finds a fault evicts
the engine: the watchdog, the weight update, or the caller of a completion. Rollouts, validation, probe and updates
take engines from here for every piece of work and keep no lists.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.watchdog import EngineDied
from megatron_scalerl.processes.child_process import LOG_END
from megatron_scalerl.record import record

logger = logging.getLogger(__name__)


class EngineState(enum.StrEnum):
    """The state of an engine, which decides what the engine may be used for."""

    STARTING = "starting"
    """The engine's server is being started."""
    STALE = "stale"
    """The engine answers and does not hold the current policy version."""
    SERVING = "serving"
    """The engine holds the current policy version and takes requests."""
    HELD = "held"
    """The engine keeps an older policy version for a validation, and gets no new rollouts and no weight update."""
    DRAINING = "draining"
    """The engine is evicted: requests are aborted and processes are being ended."""
    LOST = "lost"
    """The engine has no process. The launcher starts the engine again, unless the engine is given up."""


_ANSWERING = (EngineState.SERVING, EngineState.STALE, EngineState.HELD)


@record
class Member:
    """The state of one engine since the engine's latest change."""

    name: str
    """Name of the engine: engine-N, teacher-... for a teacher, extra-... for an engine that joined."""
    state: EngineState
    epoch: int
    """Value of `Membership.epoch` after this engine's last change of state."""
    client: EngineClient | None = None
    """HTTP client of the running server; each start of a server has a new client."""
    version: int | None = None
    """Policy version that the engine holds; None before the server's first weight update."""
    reason: str = ""
    """Reason of the eviction or loss, in one line."""
    restarts: int = 0
    """Number of times that the engine was started again."""
    lost_tokens: int = 0
    """Number of tokens that this engine generated before evictions, and that no client received."""
    given_up: bool = False
    """True if the launcher will not start the engine again."""
    joined: bool = False
    """True for an engine that joined the run later, and may leave and come back under the same name."""
    teacher: bool = False
    """True for a teacher: an engine with a teacher's weights, which gets no weight updates and no rollouts."""
    devices: float = 0
    """Number of devices (GPUs) that the run holds for the engine; a device shared with the trainer counts half.

    An engine that joined holds devices while present. Every further engine holds devices until the engine is given up
    and the host is gone.
    """


class Membership:
    """Keeps the state of all engines of a run. All methods run in one event loop.

    `until`, `evicted` and `too_few` wait; every other method returns at once.
    """

    def __init__(
        self,
        count: int,
        *,
        minimum: int = 1,
        devices: float = 1,
        teachers: Mapping[str, float] | None = None,
        record: Callable[[Member], None] = lambda member: None,
    ):
        """Create `count` members named engine-0, engine-1 and so on, and the teachers, all in the state starting.

        minimum: the run ends when fewer engines are left. devices: number of devices of each of the `count` engines.
        teachers: name of a teacher's engine -> number of devices; a teacher that is given up also ends the run.
        record: called with every changed member.
        """
        self.epoch = 0
        self.on_devices: Callable[[float], None] = lambda count: None
        """Function that this class calls with every new value of `devices`; the function must return at once."""
        self._minimum = minimum
        self._supervised = True
        self._record = record
        self._members = [
            Member(name=f"engine-{index}", state=EngineState.STARTING, epoch=0, devices=devices)
            for index in range(count)
        ]
        for name, size in (teachers or {}).items():
            self._members.append(Member(name=name, state=EngineState.STARTING, epoch=0, devices=size, teacher=True))
        self._changed = asyncio.Event()

    @classmethod
    def of(cls, clients: Sequence[EngineClient], *, version: int | None = 0) -> Membership:
        """A Membership of running engines, which are not started again after an eviction.

        version: the policy version that the engines serve; None if the engines need a weight update first.
        """
        members = cls(len(clients))
        members._supervised = False
        for index, client in enumerate(clients):
            members.join(index, client)
            if version is not None:
                members.serve(client, version)
        return members

    @property
    def members(self) -> tuple[Member, ...]:
        """All engines and teachers, in order of number."""
        return tuple(self._members)

    @property
    def serving(self) -> list[EngineClient]:
        """Clients of the engines that take requests, in order of number."""
        return self._clients(EngineState.SERVING)

    @property
    def stale(self) -> list[EngineClient]:
        """Clients of the engines that answer and need the current weights, in order of number."""
        return self._clients(EngineState.STALE)

    @property
    def alive(self) -> list[EngineClient]:
        """Clients of the engines that take part in a weight update (serving or stale), in order of number."""
        return self._clients(EngineState.SERVING, EngineState.STALE)

    @property
    def held(self) -> list[EngineClient]:
        """Clients of the engines that keep an older policy version for a measurement, in order of number."""
        return self._clients(EngineState.HELD)

    @property
    def answering(self) -> list[EngineClient]:
        """Clients of all engines that answer (serving, stale or held), in order of number."""
        return self._clients(*_ANSWERING)

    @property
    def devices(self) -> float:
        """Number of devices that the run holds at present for the engines, teachers not counted."""
        return sum(member.devices for member in self._members if not member.teacher)

    def teacher(self, name: str) -> EngineClient | None:
        """The client of the teacher with this name; None if the teacher does not answer at present."""
        return next((m.client for m in self._members if m.name == name and m.state is EngineState.STALE), None)

    def add(self, name: str, devices: int) -> int:
        """Add an engine that joins the run, and whose server is being started; returns the engine's number.

        An engine that joins again keeps the earlier number. The caller ensures that no present engine has the name.
        """
        names = [member.name for member in self._members]
        if name not in names:
            self._members.append(Member(name=name, state=EngineState.LOST, epoch=0, joined=True))
        index = [*names, name].index(name)
        member = self._members[index]
        assert member.joined and member.state is EngineState.LOST, member
        self._set(index, state=EngineState.STARTING, devices=devices, restarts=member.restarts + names.count(name))
        return index

    def start(self, index: int) -> None:
        """Record that the server of engine `index` is being started; counts a restart if the engine was lost."""
        is_restart = self._members[index].state is EngineState.LOST
        restarts = self._members[index].restarts + is_restart
        self._set(index, state=EngineState.STARTING, restarts=restarts, client=None, version=None)

    def join(self, index: int, client: EngineClient) -> None:
        """Record that the server of engine `index` answers through `client`.

        The engine becomes stale: the stream sends requests only after a weight update.
        """
        self._set(index, state=EngineState.STALE, client=client, reason="", version=None)

    def serve(self, client: EngineClient, version: int) -> None:
        """Record that an engine holds the current policy version and takes requests.

        No effect on an engine that was evicted meanwhile.
        """
        if (index := self._find(client)) is not None:
            self._set(index, state=EngineState.SERVING, version=version)

    def hold(self, client: EngineClient) -> None:
        """Let a serving engine keep the present policy version: the engine gets no new rollouts and weight updates.

        Requests in flight go on.
        """
        index = self._find(client)
        assert index is not None and self._members[index].state is EngineState.SERVING, client.name
        self._set(index, state=EngineState.HELD)

    def release(self, client: EngineClient) -> None:
        """Let a held engine take part in the next weight update.

        No effect on an engine that was evicted meanwhile.
        """
        if (index := self._find(client)) is not None:
            self._set(index, state=EngineState.STALE)

    def devices_of(self, client: EngineClient) -> float:
        """Number of devices of the engine that answers through `client`; 0 for an evicted engine."""
        index = self._find(client)
        return 0 if index is None else self._members[index].devices

    def evict(self, client: EngineClient, reason: str) -> None:
        """Abort an engine's requests, and set the state to draining, so that the launcher ends the processes.

        No effect on an engine that is already evicted.
        """
        if (index := self._find(client)) is None:
            return
        line = _line(reason)
        unreceived = max(0, client.produced_tokens - client.received_tokens)
        lost_tokens = self._members[index].lost_tokens + unreceived
        client.abort(line)
        self._set(
            index,
            state=EngineState.DRAINING,
            reason=line,
            lost_tokens=lost_tokens,
            given_up=not self._supervised and not self._members[index].joined,
        )

    def lose(self, index: int, reason: str, *, given_up: bool = False, host_gone: bool = False) -> None:
        """Record that engine `index` has no process.

        given_up: the engine will not be started again. host_gone: the host is gone, so an engine that is given up
        holds no devices.
        """
        devices = self._members[index].devices
        if self._members[index].joined or (given_up and host_gone):
            devices = 0
        self._set(
            index,
            state=EngineState.LOST,
            client=None,
            version=None,
            reason=_line(reason),
            given_up=given_up,
            devices=devices,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Evaluates the condition now and after each change of an engine's state."""
        while not condition():
            await self._changed.wait()

    async def evicted(self, client: EngineClient) -> str:
        """Wait until this engine is evicted, and return the reason."""
        await self.until(lambda: self._find(client) is None)
        return next((m.reason for m in self._members if m.client is client), "evicted")

    async def too_few(self) -> None:
        """Wait until fewer engines than `minimum` are left or a teacher is given up; then raise EngineDied."""
        await self.until(lambda: self.left < self._minimum or any(m.teacher and m.given_up for m in self._members))
        if self.left >= self._minimum:
            raise EngineDied(f"algorithm.teachers: a teacher ended and is not restarted ({self.given_up_because})")
        raise EngineDied(
            f"engine.min_engines: {self.left} engines are left, and the run needs {self._minimum} "
            f"({self.given_up_because})"
        )

    @property
    def left(self) -> int:
        """Number of engines, without teachers, that are not given up; an engine that joined counts while present."""
        absent_states = (EngineState.DRAINING, EngineState.LOST)
        started_engines = [m for m in self._members if not (m.joined or m.given_up or m.teacher)]
        joined_engines = [m for m in self._members if m.joined and m.state not in absent_states]
        return len(started_engines) + len(joined_engines)

    @property
    def given_up_because(self) -> str:
        """One line with the name of each engine that is given up, and the reason."""
        return "; ".join(f"{m.name}: {m.reason}" for m in self._members if m.given_up)

    def _clients(self, *states: EngineState) -> list[EngineClient]:
        return [m.client for m in self._members if m.client is not None and m.state in states and not m.teacher]

    def _find(self, client: EngineClient) -> int | None:
        """Number of the engine that answers through `client`; None for an evicted engine."""
        return next((i for i, m in enumerate(self._members) if m.client is client and m.state in _ANSWERING), None)

    def _set(self, index: int, **changes: object) -> None:
        previous_member = self._members[index]
        if all(getattr(previous_member, key) == value for key, value in changes.items()):
            return
        member = self._members[index] = replace(previous_member, **changes)  # type: ignore[arg-type]
        if (
            changes.get("state", previous_member.state) is previous_member.state
            and previous_member.given_up == member.given_up
        ):
            return
        self.epoch += 1
        member = self._members[index] = replace(member, epoch=self.epoch)
        suffix = f" ({member.reason})" if member.reason else ""
        logger.info("engine states, change %d: %s is %s%s", self.epoch, member.name, member.state, suffix)
        # Setting the event wakes all tasks in `until`; a new event stands for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
        if member.devices != previous_member.devices:
            self.on_devices(self.devices)
        # `record` is called last, so that an exception of `record` keeps no task from noticing this change.
        self._record(member)


def _line(reason: str) -> str:
    """The first line of a reason, without the lines of a log with which the reason may end."""
    return (reason.splitlines() or ["no reason is known"])[0].partition(LOG_END)[0]

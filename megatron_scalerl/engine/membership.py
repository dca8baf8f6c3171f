"""Which engines take work: the state of each engine, and an epoch that every change of a state increments.

A new policy version of an engine that goes on serving is no change of state.

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
    """The state of an engine, which says what the engine is used for."""

    STARTING = "starting"
    """The engine's server is being started."""
    STALE = "stale"
    """The engine answers and does not hold the current policy version."""
    SERVING = "serving"
    """The engine holds the current policy version and takes requests."""
    HELD = "held"
    """The engine keeps an older policy version for a measurement, and takes no other requests and no weight update.
    An eviction ends this, too."""
    DRAINING = "draining"
    """The engine is evicted: requests are aborted and processes are being ended."""
    LOST = "lost"
    """The engine has no process, and is started again unless given up."""


_ANSWERING = (EngineState.SERVING, EngineState.STALE, EngineState.HELD)


@record
class Member:
    """The state of one engine at one epoch."""

    name: str
    """Name of the engine: engine-N, teacher-... for a teacher, extra-... for an engine that joined."""
    state: EngineState
    epoch: int
    """Number of state changes of all engines, counted up to this engine's last change."""
    client: EngineClient | None = None
    """Client of the running server; a server that is started again has another client."""
    version: int | None = None
    """Policy version that the engine holds, None before the first weight update."""
    reason: str = ""
    """Reason of the eviction or loss, in one line."""
    restarts: int = 0
    """Number of starts after the first start."""
    lost_tokens: int = 0
    """Tokens that evicted servers of this engine generated and that no client received, in total."""
    given_up: bool = False
    """True if the engine is not started again."""
    joined: bool = False
    """True for an engine that the run did not start: such an engine may leave, and come back under the same name."""
    teacher: bool = False
    """True for a teacher, which keeps the same weights and takes no rollouts."""
    devices: float = 0
    """Devices that the run holds for the engine; a device shared with the trainer counts half. An engine that joined
    has devices while present. Any other engine has devices until the engine is given up and the host is gone."""


class Membership:
    """The engines of a run. All methods run in one event loop.

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
        """Create the members engine-0 to engine-N, and the teachers, all of which are starting.

        minimum: the run ends when fewer engines are left. devices: of each of the `count` engines. teachers: devices
        of each teacher, by the engine's name; a teacher that is given up also ends the run. record: called with every
        changed member.
        """
        self.epoch = 0
        self.on_devices: Callable[[float], None] = lambda count: None
        """Called with every new value of `devices`, after the member has changed. The function must return at
        once."""
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
        """Members for engines that were started elsewhere, and that are never started again.

        version: the policy version that the engines serve; None for stale engines.
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
        """Every engine, by number."""
        return tuple(self._members)

    @property
    def serving(self) -> list[EngineClient]:
        """Engines that take requests, by number."""
        return self._clients(EngineState.SERVING)

    @property
    def stale(self) -> list[EngineClient]:
        """Engines that answer and need the current weights, by number."""
        return self._clients(EngineState.STALE)

    @property
    def alive(self) -> list[EngineClient]:
        """Engines that a weight update includes, by number: serving or stale."""
        return self._clients(EngineState.SERVING, EngineState.STALE)

    @property
    def held(self) -> list[EngineClient]:
        """Engines that keep an older policy version, by number."""
        return self._clients(EngineState.HELD)

    @property
    def answering(self) -> list[EngineClient]:
        """Engines that answer, by number; includes engines that are held."""
        return self._clients(*_ANSWERING)

    @property
    def devices(self) -> float:
        """Devices that the run holds for the engines now."""
        return sum(member.devices for member in self._members if not member.teacher)

    def teacher(self, name: str) -> EngineClient | None:
        """The client of the teacher with this name; None unless the teacher answers."""
        return next((m.client for m in self._members if m.name == name and m.state is EngineState.STALE), None)

    def add(self, name: str, devices: int) -> int:
        """Add an engine that joins and whose server is being started; returns the engine's number.

        An engine that joins again gets the earlier number. No present engine may have the same name.
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
        """Record that the server of engine `index` is being started: for a lost engine, a restart."""
        is_restart = self._members[index].state is EngineState.LOST
        restarts = self._members[index].restarts + is_restart
        self._set(index, state=EngineState.STARTING, restarts=restarts, client=None, version=None)

    def join(self, index: int, client: EngineClient) -> None:
        """Record that the server of engine `index` answers through `client`.

        The engine serves after a weight update.
        """
        self._set(index, state=EngineState.STALE, client=client, reason="", version=None)

    def serve(self, client: EngineClient, version: int) -> None:
        """Record that an engine holds `version`, the current version.

        No effect on an engine that was evicted meanwhile.
        """
        if (index := self._find(client)) is not None:
            self._set(index, state=EngineState.SERVING, version=version)

    def hold(self, client: EngineClient) -> None:
        """Let a serving engine keep the present version: it gets no new group and no weight update.

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
        """Devices of the engine that answers through `client`; 0 for an evicted engine."""
        index = self._find(client)
        return 0 if index is None else self._members[index].devices

    def evict(self, client: EngineClient, reason: str) -> None:
        """Abort an engine's requests, and mark the engine so that its processes are ended.

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

        given_up: the engine is not started again. host_gone: the devices of an engine that is given up are not held
        either.
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
        """Wait until `condition` holds. The condition is evaluated now and after each change."""
        while not condition():
            await self._changed.wait()

    async def evicted(self, client: EngineClient) -> str:
        """Wait until this engine is evicted, and return the reason."""
        await self.until(lambda: self._find(client) is None)
        return next((m.reason for m in self._members if m.client is client), "evicted")

    async def too_few(self) -> None:
        """Wait until too few engines are left or a teacher is given up, then raise EngineDied."""
        await self.until(lambda: self.left < self._minimum or any(m.teacher and m.given_up for m in self._members))
        if self.left >= self._minimum:
            raise EngineDied(f"algorithm.teachers: a teacher is given up ({self.given_up_because})")
        raise EngineDied(
            f"engine.min_engines: {self.left} engines are left, and the run needs {self._minimum} "
            f"({self.given_up_because})"
        )

    @property
    def left(self) -> int:
        """Number of engines that are not given up. An engine that joined counts while present."""
        absent_states = (EngineState.DRAINING, EngineState.LOST)
        started_engines = [m for m in self._members if not (m.joined or m.given_up or m.teacher)]
        joined_engines = [m for m in self._members if m.joined and m.state not in absent_states]
        return len(started_engines) + len(joined_engines)

    @property
    def given_up_because(self) -> str:
        """The engines that are given up, and why, in one line."""
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
        logger.info("epoch %d: %s is %s%s", self.epoch, member.name, member.state, suffix)
        # A set event wakes all present waiters; the next change gets a new event, which is not set.
        self._changed.set()
        self._changed = asyncio.Event()
        if member.devices != previous_member.devices:
            self.on_devices(self.devices)
        # `record` is called last: if `record` fails, nobody waits for this change forever.
        self._record(member)


def _line(reason: str) -> str:
    """The first line of a reason, without the end of a log that may follow."""
    return (reason.splitlines() or ["no reason is known"])[0].partition(LOG_END)[0]

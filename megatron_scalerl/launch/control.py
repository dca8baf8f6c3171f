"""The controller's socket to the agents of engines on other hosts (`engine.agent`), and each agent as it sees it.

One task, `EngineRegistry.serve`, reads the socket. It resolves what the holders of an `AgentLink` wait for, refuses
with a reason whoever does not belong to this start of the controller, and puts engines that join into a queue. No
frame ends it: an agent that sends an invalid one has ended, for the controller, and is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from megatron_scalerl.distributed import sockets
from megatron_scalerl.launch import agent_messages as messages

PROBE_INTERVAL_S = 1.0
"""Interval at which the agents' connections are checked (seconds)."""
MAX_JOINING = 64
"""Engines that may wait to be taken into the run; one more is refused."""
_DRAINED = 1024
"""Messages that are read, at most, before an agent that has disconnected is taken for lost: its last one may be
among them."""


class AgentLink:
    """One agent: its start was requested, or it has joined. The futures never have an exception.

    `EngineRegistry.serve` resolves them, in this order, but `ended` at any time; each once.
    """

    def __init__(self, registry: EngineRegistry, name: str, start: str, host: str) -> None:
        """host: where it is expected; an agent that joins says so itself. start: empty for one that joins."""
        loop = asyncio.get_running_loop()
        self.name, self.start, self.host = name, start, host
        self.hello: asyncio.Future[messages.Hello] = loop.create_future()
        self.up: asyncio.Future[str] = loop.create_future()
        """URL of the server."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """How, as in "engine-3 (host b) REASON"."""
        self._registry = registry

    @property
    def joined(self) -> bool:
        """True if the controller did not start it."""
        return not self.start

    async def stop(self, grace_s: float) -> None:
        """Let the agent end its server, by SIGKILL after `grace_s` seconds, and exit; does not wait for it."""
        await self._registry.send(self, messages.Stop(grace_s=grace_s))

    async def forget(self) -> None:
        """Refuse the agent from now on, connected or not; it ends its server then."""
        await self._registry.forget(self)


class EngineRegistry:
    """The agents of one start of the controller. `serve` in a task, then `close`; create it in a running event loop.

    ZeroMQ's queues: at most `sockets.MAX_QUEUED` messages per agent and direction, none of more than
    `messages.LONGEST` bytes. Nothing waits for room in them: what does not fit is not sent.

    joining: engines that offer themselves. `serve` fills it, `launch.engines` empties it; at most MAX_JOINING, one
    more is refused. Who empties it ends before `close`; the agents in it exit then, since they are disconnected.
    """

    def __init__(
        self,
        *,
        address: str,
        secret: str,
        run_id: str,
        incarnation: str,
        welcome: messages.Welcome,
        objection: Callable[[messages.Hello], str | None] = lambda hello: None,
    ) -> None:
        """address: the controller's, as other hosts reach it. objection: why an engine may not join now, or None.

        Raises ValueError for an address that is not this host's.
        """
        self._run_id, self._incarnation = run_id, incarnation
        self._welcome, self._join_objection = welcome, objection
        self.joining: asyncio.Queue[AgentLink] = asyncio.Queue(MAX_JOINING)
        self._expected: dict[str, AgentLink] = {}
        """By start, until Hello."""
        self._connected: dict[bytes, AgentLink] = {}
        """By ZeroMQ's identity, from Hello to the end."""
        self._socket = sockets.ControllerSocket(
            secret, sockets.Purpose.ENGINES, address=address, longest=messages.LONGEST
        )
        self.endpoint = self._socket.endpoint

    def expect(self, name: str, start: str, host: str) -> AgentLink:
        """The agent of a start that is requested next; `start` is new for each."""
        link = self._expected[start] = AgentLink(self, name, start, host)
        return link

    async def serve(self) -> NoReturn:
        """Read the socket until cancelled; the only task that does. Waits for messages and, for the probe, time."""
        loop = asyncio.get_running_loop()
        probe_at = loop.time() + PROBE_INTERVAL_S
        while True:
            left_s = max(0.0, probe_at - loop.time())
            if await self._socket.poll(int(left_s * 1000) + 1):
                await self._read()
            if loop.time() >= probe_at:
                await self._probe()
                probe_at = loop.time() + PROBE_INTERVAL_S

    def close(self) -> None:
        """Close the socket; agents that are connected end their servers and exit."""
        self._socket.close()

    async def send(self, link: AgentLink, message: messages.ToAgent) -> None:
        """Send a message, if the agent is connected and reads its messages."""
        for identity, each in list(self._connected.items()):
            if each is link and not await self._sent(identity, message):
                self._end(identity, "lost its agent, which disconnected")

    async def forget(self, link: AgentLink) -> None:
        """See `AgentLink.forget`."""
        self._expected.pop(link.start, None)
        await self.send(link, sockets.Refused(reason="the controller has given this start up"))
        for identity in [identity for identity, each in self._connected.items() if each is link]:
            self._end(identity, "was given up by the controller")

    async def _read(self) -> None:
        """Take one message."""
        sender, frames = await self._socket.read()
        try:
            message = messages.decode_for_controller(frames)
        except sockets.InvalidMessage as error:
            await self._refuse(sender, str(error))
            return
        link = self._connected.get(sender)
        if isinstance(message, messages.Hello) and link is None:
            await self._greet(sender, message)
        elif isinstance(message, messages.Up) and link is not None and not link.up.done():
            link.up.set_result(message.url)
        elif isinstance(message, messages.Exited) and link is not None:
            how = f"exited with code {message.code}" + ("" if link.up.done() else " before it was up")
            self._end(sender, message.reason or how)
        else:
            await self._refuse(sender, f"expected another message now, found {type(message).__name__}")

    async def _greet(self, sender: bytes, hello: messages.Hello) -> None:
        reason = self._objection(hello)
        if reason is not None:
            await self._refuse(sender, reason)
            return
        joins = hello.name.startswith(messages.JOINING)
        link = AgentLink(self, hello.name, "", hello.host) if joins else self._expected.pop(hello.start)
        self._connected[sender] = link
        link.hello.set_result(hello)
        if joins:
            self.joining.put_nowait(link)
        await self.send(link, self._welcome)

    def _objection(self, hello: messages.Hello) -> str | None:
        """The reason why this agent is refused, or None."""
        if reason := hello.objection(self._run_id, self._incarnation):
            return reason
        if any(link.name == hello.name for link in self._connected.values()):
            return f"{hello.name}: expected one agent, found a second"
        if not hello.name.startswith(messages.JOINING):
            link = self._expected.get(hello.start)
            return None if link is not None and link.name == hello.name else f"{hello.name}: not expected (any more)"
        if hello.start:
            return f"{hello.name}: expected no start of an engine that joins, found {hello.start}"
        if self.joining.full():
            return f"{MAX_JOINING} engines are joining already"
        return self._join_objection(hello)

    async def _refuse(self, sender: bytes, reason: str) -> None:
        """Answer with Refused; if the sender was an agent of this run, it has ended."""
        await self._sent(sender, sockets.Refused(reason=reason))
        self._end(sender, f"was refused: {reason}")

    async def _probe(self) -> None:
        """End the links of agents that are not connected any more."""
        lost = [identity for identity in list(self._connected) if not await self._socket.connected(identity)]
        for _ in range(_DRAINED if lost else 0):
            if not await self._socket.poll(0):
                break
            await self._read()
        for identity in lost:
            self._end(identity, "lost its agent, which disconnected")

    async def _sent(self, identity: bytes, message: messages.ToAgent) -> bool:
        """Send without waiting; False if the receiver is not connected. With a full queue nothing is sent."""
        return await self._socket.send(identity, sockets.encode(message), wait=False)

    def _end(self, identity: bytes, reason: str) -> None:
        link = self._connected.pop(identity, None)
        if link is not None and not link.ended.done():
            link.ended.set_result(reason)

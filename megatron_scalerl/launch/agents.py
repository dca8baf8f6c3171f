"""Engines on other hosts: the socket to their agents, their certificate, and the command that starts one.

One task, `Agents.serve`, reads the socket. It resolves what the holders of a `RemoteServer` wait for, refuses with a
reason whoever does not belong to this start of the controller, and puts engines that join into a queue. No frame ends
it: an agent that sends an invalid one has ended, for the controller, and is refused.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of
from megatron_scalerl.engine.certificate import make_certificate
from megatron_scalerl.launch import agent_messages as messages
from megatron_scalerl.launch.control_folder import ControllerFile, write_controller
from megatron_scalerl.launch.hosts import Hosts
from megatron_scalerl.launch.own_share import SHARE
from megatron_scalerl.launch.placement import Attempt, EnginePlace
from megatron_scalerl.launch.remote_server import DISCONNECTED, Launch, RemoteServer
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.processes.logs import NAME_VARIABLE
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.transport import resolve_transport

PROBE_INTERVAL_S = 1.0
"""Interval at which the agents' connections are checked (seconds)."""
MAX_JOINING = 64
"""Engines that may wait to be taken into the run; one more is refused."""
_DRAINED = 1024
"""Messages that are read, at most, before an agent that has disconnected is taken for lost: its last one may be
among them."""


class Agents:
    """All agents of one start of the controller. `serve` in a task, then `close`; create it in a running event loop.

    An agent's message has at most `messages.LONGEST` bytes. Nothing waits for room in a queue: what does not fit is
    not sent.

    joining: engines that offer themselves. `serve` fills it, `launch.engines` empties it; at most MAX_JOINING, one
    more is refused. Who empties it ends before `close`; the agents in it exit then, since they are disconnected.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        hosts: Hosts,
        attempt: Attempt,
        secret: str,
        objection: Callable[[messages.Hello], str | None] = lambda hello: None,
    ) -> None:
        """attempt: folder, run id and incarnation of the controller. objection: why an engine may not join, or None.

        Binds the socket to the controller's address among `hosts`. Raises ValueError for one that is not this host's.
        """
        assert hosts.address is not None, hosts
        self._recipe, self._hosts, self._attempt, self._objection_to_joining = recipe, hosts, attempt, objection
        certificate = make_certificate()
        self.tls = certificate.trusting()
        self.welcome = messages.Welcome(
            certificate=certificate.certificate,
            key=certificate.key,
            transport=resolve_transport(recipe.weights.transport),
        )
        self.interface = interface_of(HostRendezvous(host=hosts.address, port=0))
        """Name of this host's interface to the others."""
        self.joining: asyncio.Queue[RemoteServer] = asyncio.Queue(MAX_JOINING)
        self._servers: list[RemoteServer] = []
        self._socket = sockets.ControllerSocket(
            secret, sockets.Purpose.ENGINES, address=hosts.address, longest=messages.LONGEST
        )
        self.endpoint = self._socket.endpoint

    def announce(self) -> None:
        """Write RUN/control/controller.json, which agents read. Raises OSError."""
        content = ControllerFile(
            engines=self.endpoint,
            run_id=self._attempt.run_id,
            incarnation=self._attempt.incarnation,
            recipe_file=str(self._attempt.recipe_file.absolute()),
        )
        write_controller(self._attempt.folder, content)

    def engine(self, index: int, place: EnginePlace) -> RemoteServer:
        """One start of engine `index` on another host."""
        start, port = uuid.uuid4().hex, self._recipe.engine.port
        name, agent = f"engine-{index}", f"agent-{index}"  # two logs: the other host writes the server's
        argv = [
            *(sys.executable, "-m", "megatron_scalerl.launch.agent", str(self._attempt.folder.absolute())),
            *("--name", name, "--start", start, "--incarnation", self._attempt.incarnation),
            *("--devices", str(self._recipe.engine.devices_per_engine)),
            *("--port", str(port + index if port else 0)),
            *(("--gpus", ",".join(map(str, place.positions))) if place.positions is not None else ()),
        ]
        command = self._hosts.command(place.host, argv, {NAME_VARIABLE: name, SHARE: place.share})
        log = self._attempt.folder / "logs" / f"{agent}.log"
        return self.expect(name, place.host.name, start, partial(ChildProcess.start, agent, command, os.environ, log))

    def expect(self, name: str, host: str, start_id: str = "", launch: Launch | None = None) -> RemoteServer:
        """The server of an agent that `launch` is about to start or, without `start_id`, of one that has joined."""
        log = self._attempt.folder / "logs" / f"{name}.log"
        server = RemoteServer(self._socket, name=name, host=host, log_path=log, start_id=start_id, launch=launch)
        self._servers.append(server)
        return server

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
        """Close the socket; agents that are still connected exit, and their servers with them."""
        self._socket.close()

    async def _read(self) -> None:
        """Take one message."""
        sender, frames = await self._socket.read()
        server = next((each for each in self._connected() if each.identity == sender), None)
        try:
            message = messages.decode_for_controller(frames)
        except sockets.InvalidMessage as error:
            await self._refuse(sender, server, str(error))
            return
        if isinstance(message, messages.Hello) and server is None:
            await self._greet(sender, message)
        elif isinstance(message, messages.Up) and server is not None and not server.up.done():
            server.up.set_result(message.url)
        elif isinstance(message, messages.Exited) and server is not None:
            how = f"exited with code {message.code}" + ("" if server.up.done() else " before it was up")
            server.end(message.reason or how)
        else:
            await self._refuse(sender, server, f"expected another message now, found {type(message).__name__}")

    async def _greet(self, sender: bytes, hello: messages.Hello) -> None:
        joins = hello.name.startswith(messages.JOINING)
        if (reason := self._objection(hello, joins=joins)) is not None:
            await self._refuse(sender, None, reason)
            return
        server = self.expect(hello.name, hello.host) if joins else self._requested(hello)
        assert server is not None
        server.identity = sender
        server.hello.set_result(hello)
        if joins:
            self.joining.put_nowait(server)
        await server.tell(self.welcome)

    def _objection(self, hello: messages.Hello, *, joins: bool) -> str | None:
        """The reason why this agent is refused, or None."""
        if reason := hello.objection(self._attempt.run_id, self._attempt.incarnation):
            return reason
        if any(server.name == hello.name for server in self._connected()):
            return f"{hello.name}: expected one agent, found a second"
        if not joins:
            return None if self._requested(hello) is not None else f"{hello.name}: not expected (any more)"
        if hello.start:
            return f"{hello.name}: expected no start of an engine that joins, found {hello.start}"
        if self.joining.full():
            return f"{MAX_JOINING} engines are joining already"
        return self._objection_to_joining(hello)

    def _requested(self, hello: messages.Hello) -> RemoteServer | None:
        """The server whose agent this is."""
        waiting = [server for server in self._servers if server.identity is None and not server.ended.done()]
        return next((each for each in waiting if (each.name, each.start_id) == (hello.name, hello.start)), None)

    def _connected(self) -> list[RemoteServer]:
        return [server for server in self._servers if server.identity is not None and not server.ended.done()]

    async def _refuse(self, sender: bytes, server: RemoteServer | None, reason: str) -> None:
        """Answer with Refused; if the sender was an agent of this run, it has ended."""
        await self._socket.send(sender, sockets.encode(sockets.Refused(reason=reason)), wait=False)
        if server is not None:
            server.end(f"was refused: {reason}")

    async def _probe(self) -> None:
        """End the servers of agents that are not connected any more, and forget all that have ended."""
        lost = [each for each in self._connected() if not await self._socket.connected(each.identity or b"")]
        for _ in range(_DRAINED if lost else 0):
            if not await self._socket.poll(0):
                break
            await self._read()
        for server in lost:
            server.end(DISCONNECTED)
        self._servers = [server for server in self._servers if not server.ended.done()]

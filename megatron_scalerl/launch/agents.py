"""The controller's side of engines on other hosts: the socket to the agents, and the server behind each agent.

One task, `Agents.serve`, reads the socket. The task resolves the futures of every `RemoteServer`, puts engines that
join into a queue, and refuses agents of other runs or of earlier starts of the controller. An invalid frame does not
end the task: the agent that sent the frame is refused and counts as ended.

The controller starts an agent (`launch.agent`) by a command, such as ssh or srun, as a child process, or the agent
joins without a command. In both cases the server counts as ended when the agent's connection is lost. The exit of the
command does not decide, since an agent may go on after the command has exited, and the reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of
from megatron_scalerl.engine.certificate import make_certificate
from megatron_scalerl.launch import agent as messages
from megatron_scalerl.launch.control_folder import public_environment, start_agent, write_controller
from megatron_scalerl.launch.hosts import Hosts, takes_gpus
from megatron_scalerl.launch.local_server import STOP_S, ServerEnded, engine_port
from megatron_scalerl.launch.placement import Attempt, EnginePlace
from megatron_scalerl.processes.child_process import ChildProcess, race
from megatron_scalerl.recipe import Recipe

PROBE_INTERVAL_S = 1.0
"""Seconds between two checks of the agents' connections."""
MAX_JOINING = 64
"""Most engines that may wait in the queue to join the run. While the queue is full, further engines are refused."""
_MAX_DRAINED_MESSAGES = 1024
"""Largest number of unread messages that are read before a disconnected agent counts as lost, since the last message
of the agent, with the reason for the end, may be among the unread messages."""
HELLO_S = 120.0
"""Time limit (s) from the start of an agent's command to the agent's Hello. Slurm schedules the step and Python
imports modules in this time."""
ANSWER_S = 15.0
"""Seconds that the controller waits for an agent's report of the server's end, beyond the time limit for the server
to exit."""
EXIT_S = 5.0
"""Seconds for an agent to exit after reporting the end of the server."""
DISCONNECTED = "lost the connection to the agent on its host"

Launch = Callable[[], Awaitable[ChildProcess]]


class RemoteServer:
    """An engine's server on another host, started and ended by an agent there. Has the methods of `LocalServer`.

    `Agents.serve` sets the results of the futures `hello` and `up`, in this order, and of `end_reason` at any time.
    The futures never get exceptions.
    """

    def __init__(self, agents: Agents, *, name: str, host: str, start_id: str, launch: Launch | None):
        """start_id: id of the agent's start; empty for an agent that joins. launch: starts the agent's command; None
        for an agent that joins."""
        future = asyncio.get_running_loop().create_future
        self.name = name
        self.host = host
        self.location = f"host {host}"
        """Where the server is, for error messages."""
        self.start_id = start_id
        # The server writes this log, into a folder that both hosts see.
        self._log_path = agents.logs / f"{name}.log"
        self.tls = agents.tls
        self.welcome = agents.welcome
        """The controller's answer to Hello, with certificate, port and devices for the server."""
        self.identity = b""
        """ZeroMQ's name of the agent's connection; empty until the agent has sent Hello."""
        self.hello: asyncio.Future[messages.Hello] = future()
        self.up: asyncio.Future[str] = future()
        """URL of the server."""
        self.end_reason: asyncio.Future[str] = future()
        """Why the server ended, as the predicate after "engine-3 (host b)"."""
        self.command: ChildProcess | None = None
        self._socket = agents.socket
        self._launch = launch

    @property
    def reached(self) -> bool:
        """Whether the agent has ever connected, which shows that the host was reachable."""
        return self.hello.done()

    @property
    def connected(self) -> bool:
        """Whether the agent has connected and has not ended."""
        return self.reached and not self.end_reason.done()

    async def start(self) -> str:
        """Start the agent, wait until the server is up, and return the server's URL.

        Raises ServerEnded if the agent or the server ends first or sends no Hello in time, and OSError if the command
        cannot be started.
        """
        assert self.command is None, "start() may be called once only"
        if self._launch is not None:
            self.command = await self._launch()
        try:
            async with asyncio.timeout(HELLO_S):
                await self._unless_ended(self.hello)
        except TimeoutError:
            raise ServerEnded(
                f"sent no message through its agent within {HELLO_S:g} s: the command that starts the agent hangs, "
                "or the agent does not reach the controller"
            ) from None
        await self._unless_ended(self.up)
        return self.up.result()

    async def wait(self) -> str:
        """Wait until the server or the agent has ended, and return the reason."""
        if self.command is None:
            return await asyncio.shield(self.end_reason)
        async with race(self.command.wait(), asyncio.shield(self.end_reason)) as (command, _):
            # A connected agent may go on without the command. `Agents` sets end_reason if the connection is lost.
            if self.reached:
                await asyncio.wait({self.end_reason})
            if self.end_reason.done():
                return self.end_reason.result()
            return f"lost the command that started its agent, which exited with code {command.result()}"

    @property
    def log_path(self) -> Path:
        """The log of the server. If the agent has never connected, the log of the command that starts the agent."""
        if self.command is None or self.reached:
            return self._log_path
        return self.command.log

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Let the agent end the server by SIGTERM, and by SIGKILL after `grace_s` seconds, then end the command.

        May be called twice. Raises RuntimeError if the agent is connected but does not report the end of the server,
        which then may still hold devices.
        """
        # Within this limit both sides notice a broken connection, and the agent then ends the server.
        limit_s = max(grace_s, sockets.HEARTBEAT_TIMEOUT_MS / 1000) + ANSWER_S
        answered = True
        try:
            if self.connected:
                await self.send(messages.Stop(grace_s=grace_s))
                _, unfinished = await asyncio.wait({self.end_reason}, timeout=limit_s)
                answered = not unfinished
        finally:
            await self.forget()
            if self.command is not None:
                # The agent exits by itself after the report. A signal would make the command fail.
                if answered and self.reached:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.command.wait(), EXIT_S)
                await self.command.stop(STOP_S)
        if not answered:
            raise RuntimeError(
                f"{self.name} ({self.location}): its agent is connected and did not end the server within "
                f"{limit_s:g} s; the server's processes may still hold devices"
            )

    async def send(self, message: messages.ToAgent) -> None:
        """Send a message to the agent if connected. If the agent reads nothing, the message is dropped."""
        if self.connected and not await self._socket.send(self.identity, sockets.encode(message), wait=False):
            self.end(DISCONNECTED)

    async def forget(self) -> None:
        """Give up the agent. If connected now or later, the agent is refused and ends the server."""
        await self.send(sockets.Refused(reason="the controller has given up this start of the engine"))
        self.end("was given up by the controller")

    def end(self, reason: str) -> None:
        """Record why the agent or the server has ended. A second call has no effect."""
        if not self.end_reason.done():
            self.end_reason.set_result(reason)

    async def _unless_ended(self, sign: asyncio.Future[Any]) -> None:
        """Wait until the future `sign` is resolved. Raises ServerEnded if the agent or its command ends first."""
        async with race(self.wait(), asyncio.shield(sign)) as (ending, _):
            if not sign.done():
                raise ServerEnded(ending.result())


class Agents:
    """All agents of one start of the controller.

    The caller must create the object in a running event loop, run `serve` in a task, and call `close` at the end. A
    message of an agent has at most `messages.LONGEST` bytes. If the socket's queue for an agent is full, a message
    to the agent is dropped.

    joining: queue of at most MAX_JOINING engines that want to join. `serve` fills the queue, `launch.engines` empties
    the queue. `close` disconnects agents that are still in the queue, and these agents exit.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        hosts: Hosts,
        attempt: Attempt,
        secret: str,
        objection: Callable[[messages.Hello], str | None] = lambda hello: None,
    ):
        """attempt: folder, run id and incarnation of the controller. objection: returns the reason why an engine may
        not join, or None to accept the engine.

        Binds the socket to `hosts.address`. Raises ValueError if this address is not one of this host.
        """
        assert hosts.address is not None, hosts
        self._recipe = recipe
        self._hosts = hosts
        self._attempt = attempt
        self._objection_to_joining = objection
        certificate = make_certificate()
        self.tls = certificate.trusting()
        self.welcome = messages.Welcome(certificate=certificate.certificate, key=certificate.key)
        self.interface = interface_of(HostRendezvous(host=hosts.address, port=0))
        """Name of the interface through which this host reaches the other hosts."""
        self.joining: asyncio.Queue[RemoteServer] = asyncio.Queue(MAX_JOINING)
        self._servers: list[RemoteServer] = []
        self.socket = sockets.ControllerSocket(
            secret, sockets.Purpose.ENGINES, address=hosts.address, longest=messages.LONGEST
        )
        self.endpoint = self.socket.endpoint
        self.logs = attempt.folder / "logs"
        self._environment = public_environment(attempt, self.endpoint, secret, sockets.Purpose.ENGINES)

    def announce(self) -> None:
        """Write RUN/control/controller.json, which `engine --join` reads. Raises OSError."""
        write_controller(self._attempt.folder, self._environment)

    def engine(self, index: int, name: str, place: EnginePlace, devices: int) -> RemoteServer:
        """A server for one start of engine `index` on another host. Engines of teachers have the last indices."""
        start = uuid.uuid4().hex
        environment = self._environment | {"MSRL_START": start, "MSRL_DEVICES": str(devices)}
        # The command writes this log. The server on the other host writes a second log.
        log = self.logs / f"agent-{name.removeprefix('engine-')}.log"
        launch = partial(start_agent, self._hosts, place.host, name, environment, log)
        server = self.expect(name, place.host.name, start, launch)
        server.welcome = msgspec.structs.replace(
            self.welcome, port=engine_port(self._recipe.engine, index), positions=place.positions
        )
        return server

    def expect(self, name: str, host: str, start_id: str = "", launch: Launch | None = None) -> RemoteServer:
        """Register the server of an agent that `launch` will start; without `launch`, of an agent that has joined."""
        server = RemoteServer(self, name=name, host=host, start_id=start_id, launch=launch)
        self._servers.append(server)
        return server

    async def serve(self) -> NoReturn:
        """Read the socket until cancelled. No other task reads the socket.

        Waits for a message, or until the next check of the connections is due.
        """
        loop = asyncio.get_running_loop()
        probe_at = loop.time() + PROBE_INTERVAL_S
        while True:
            left_s = max(0.0, probe_at - loop.time())
            if await self.socket.poll(int(left_s * 1000) + 1):
                await self._read()
            if loop.time() >= probe_at:
                await self._probe()
                probe_at = loop.time() + PROBE_INTERVAL_S

    def close(self) -> None:
        """Close the socket. Agents that are still connected then end the servers and exit."""
        self.socket.close()

    async def _read(self) -> None:
        """Read and handle one message."""
        sender, frames = await self.socket.read()
        server = next((server for server in self._connected() if server.identity == sender), None)
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
            server.end(message.how)
        else:
            await self._refuse(sender, server, f"this agent sent a message {type(message).__name__} out of order")

    async def _greet(self, sender: bytes, hello: messages.Hello) -> None:
        joins = hello.name.startswith(messages.JOINING)
        waiting = [server for server in self._servers if not server.reached and not server.end_reason.done()]
        starts = {(server.name, server.start_id): server for server in reversed(waiting)}
        server = starts.get((hello.name, hello.start))
        reason = hello.objection(self._attempt.run_id, self._attempt.incarnation)
        if reason is None and any(server.name == hello.name for server in self._connected()):
            reason = f"{hello.name}: an agent of this name is connected already"
        if reason is None and joins:
            reason = self._objection(hello)
        elif reason is None and server is None:
            reason = f"{hello.name}: the controller does not wait for this start of the engine"
        if reason is not None:
            await self._refuse(sender, None, reason)
            return
        if server is None:
            server = self.expect(hello.name, hello.host)
            if takes_gpus(self._recipe.weights.transport):
                server.welcome = msgspec.structs.replace(self.welcome, positions=list(range(hello.devices)))
        # `identity` is set before `hello`, since a task that waits for `hello` may send at once.
        server.identity = sender
        server.hello.set_result(hello)
        if joins:
            self.joining.put_nowait(server)
        await server.send(server.welcome)

    def _objection(self, hello: messages.Hello) -> str | None:
        """The reason why this agent may not join; None if the agent may join."""
        if hello.start:
            return f"{hello.name}: an engine that joins has an empty MSRL_START, but this engine has {hello.start}"
        if self.joining.full():
            return f"{MAX_JOINING} engines are joining already; start this engine again later"
        return self._objection_to_joining(hello)

    def _connected(self) -> list[RemoteServer]:
        return [server for server in self._servers if server.connected]

    async def _refuse(self, sender: bytes, server: RemoteServer | None, reason: str) -> None:
        """Send an agent Refused; the agent then exits. server: the agent's server, which then counts as ended."""
        await self.socket.send(sender, sockets.encode(sockets.Refused(reason=reason)), wait=False)
        if server is not None:
            server.end(f"was refused: {reason}")

    async def _probe(self) -> None:
        """Note that disconnected agents have ended, and forget the servers of all agents that have ended."""
        lost = [server for server in self._connected() if not await self.socket.connected(server.identity)]
        # An agent sends the reason (Exited) before an orderly exit. This message may still be unread.
        if lost:
            for _ in range(_MAX_DRAINED_MESSAGES):
                if not await self.socket.poll(0):
                    break
                await self._read()
        for server in lost:
            server.end(DISCONNECTED)
        self._servers = [server for server in self._servers if not server.end_reason.done()]

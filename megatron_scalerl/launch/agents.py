"""The controller's side of engines on other hosts: the socket to the agents, and the server behind each agent.

One task, `Agents.serve`, reads the socket. The task resolves the futures of every `RemoteServer`, refuses with a
reason whoever does not belong to this start of the controller, and puts engines that join into a queue. No frame ends
the task: an agent that sends an invalid frame counts as ended and is refused.

The controller starts an agent (`launch.agent`) by a command, such as ssh or srun, as a child process, or the agent
joins without a command. Either way the agent's connection decides the fate of the server: command and agent may each
outlive the other.
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
"""Interval at which the agents' connections are checked (seconds)."""
MAX_JOINING = 64
"""Most engines that may wait to be taken into the run; a further engine is refused."""
_MAX_DRAINED_MESSAGES = 1024
"""Most messages to read before a disconnected agent counts as lost: the agent's last message may still be unread."""
HELLO_S = 120.0
"""Seconds from the start of an agent's command to Hello. In this time the step is scheduled and modules are
imported."""
ANSWER_S = 15.0
"""Seconds for an agent to report the end of the server, once a report is due."""
EXIT_S = 5.0
"""Seconds for an agent to exit after the agent's report about the end of the server."""
DISCONNECTED = "lost the connection to the agent on its host"

Launch = Callable[[], Awaitable[ChildProcess]]


class RemoteServer:
    """An engine's server on another host, started and ended by an agent there. Has the methods of `LocalServer`.

    `Agents.serve` resolves the futures `hello` and `up`, in this order, and `end_reason` at any time. No future gets
    an exception.
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
        """The controller's answer to Hello."""
        self.identity = b""
        """ZeroMQ's name of the agent's connection, empty before Hello."""
        self.hello: asyncio.Future[messages.Hello] = future()
        self.up: asyncio.Future[str] = future()
        """URL of the server."""
        self.end_reason: asyncio.Future[str] = future()
        """Why the server ended; the text continues "engine-3 (host b)"."""
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

        Raises ServerEnded and OSError.
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
            # The agent may outlive the command; a lost connection ends the agent (`Agents`).
            if self.reached:
                await asyncio.wait({self.end_reason})
            if self.end_reason.done():
                return self.end_reason.result()
            return f"lost the command that started its agent, which exited with code {command.result()}"

    @property
    def log_path(self) -> Path:
        """The server's log or, for an agent that never connected, the log of the agent's command."""
        if self.command is None or self.reached:
            return self._log_path
        return self.command.log

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Let the agent end the server, by SIGKILL after `grace_s`, then end the command. May be called twice.

        Raises RuntimeError if the agent is connected and does not report the end: the server may hold devices.
        """
        # If the agent cannot be reached, both sides give up the connection after the heartbeats' time limit, and the
        # agent then ends the server.
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
                # The agent exits by itself; a signal would look like a failure.
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
        """Send a message to the agent; no effect unless the agent is connected and reads messages."""
        if self.connected and not await self._socket.send(self.identity, sockets.encode(message), wait=False):
            self.end(DISCONNECTED)

    async def forget(self) -> None:
        """Refuse the agent from now on, whether the agent is connected or not. The agent then ends the server."""
        await self.send(sockets.Refused(reason="the controller has given up this start of the engine"))
        self.end("was given up by the controller")

    def end(self, reason: str) -> None:
        """Record that the agent has ended, for this reason. No effect after an earlier end."""
        if not self.end_reason.done():
            self.end_reason.set_result(reason)

    async def _unless_ended(self, sign: asyncio.Future[Any]) -> None:
        """Wait until the future `sign` is resolved. Raises ServerEnded if the agent or its command ends first."""
        async with race(self.wait(), asyncio.shield(sign)) as (ending, _):
            if not sign.done():
                raise ServerEnded(ending.result())


class Agents:
    """All agents of one start of the controller. Create in a running event loop, `serve` in a task, then `close`.

    An agent's message has at most `messages.LONGEST` bytes. Nothing waits for room in a queue: a message that does
    not fit is not sent.

    joining: queue of at most MAX_JOINING engines that want to join; a further engine is refused. `serve` fills the
    queue. `launch.engines` empties the queue, and ends before `close`. Agents that are left in the queue are then
    disconnected, and exit.
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
        """attempt: folder, run id and incarnation of the controller. objection: why an engine may not join; None if
        it may.

        Binds the socket to the controller's address in `hosts`. Raises ValueError for another host's address.
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
        """The server for the next start of engine `index` on another host. The engine may be a teacher."""
        start = uuid.uuid4().hex
        environment = self._environment | {"MSRL_START": start, "MSRL_DEVICES": str(devices)}
        # This log is the command's; the server's log is written on the other host.
        log = self.logs / f"agent-{name.removeprefix('engine-')}.log"
        launch = partial(start_agent, self._hosts, place.host, name, environment, log)
        server = self.expect(name, place.host.name, start, launch)
        server.welcome = msgspec.structs.replace(
            self.welcome, port=engine_port(self._recipe.engine, index), positions=place.positions
        )
        return server

    def expect(self, name: str, host: str, start_id: str = "", launch: Launch | None = None) -> RemoteServer:
        """Register the server of an agent that `launch` is about to start or, without `start_id`, that has joined."""
        server = RemoteServer(self, name=name, host=host, start_id=start_id, launch=launch)
        self._servers.append(server)
        return server

    async def serve(self) -> NoReturn:
        """Read the socket until cancelled. No other task reads the socket.

        Waits for messages and, between two probes of the connections, for time.
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
        """Close the socket. Agents that are still connected end the servers, and exit."""
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
            await self._refuse(sender, server, f"the protocol allows no {type(message).__name__} from the agent now")

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
        # The identity is set before the future, since whoever waits for Hello may send at once.
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
        """Answer with Refused, which ends an agent of this run."""
        await self.socket.send(sender, sockets.encode(sockets.Refused(reason=reason)), wait=False)
        if server is not None:
            server.end(f"was refused: {reason}")

    async def _probe(self) -> None:
        """End the servers of agents that are no longer connected, and forget all agents that have ended."""
        lost = [server for server in self._connected() if not await self.socket.connected(server.identity)]
        # An agent that exits in order has sent Exited with the reason, and the message may still be unread.
        if lost:
            for _ in range(_MAX_DRAINED_MESSAGES):
                if not await self.socket.poll(0):
                    break
                await self._read()
        for server in lost:
            server.end(DISCONNECTED)
        self._servers = [server for server in self._servers if not server.end_reason.done()]

"""One vLLM server on another host, behind an agent (`launch.agent`). Runs in the controller.

The controller starts the agent by a command, such as ssh or srun, which is its child process, or the agent has joined
by itself. Either way the agent's connection (`launch.agents`) says what becomes of the server: the command may end
while the agent goes on, and the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_scalerl.distributed import sockets
from megatron_scalerl.launch import agent_messages as messages
from megatron_scalerl.launch.local_server import STOP_S, ServerEnded
from megatron_scalerl.launch.race import race
from megatron_scalerl.processes.child_process import ChildProcess, log_end

HELLO_S = 120.0
"""Seconds from the start of an agent's command to its first message: for the step to be scheduled, and imports."""
ANSWER_S = 15.0
"""Seconds for an agent to report the end of its server, once that is due."""
EXIT_S = 5.0
"""Seconds for an agent that has reported the end of its server to exit."""
DISCONNECTED = "lost its agent, which disconnected"

Launch = Callable[[], Awaitable[ChildProcess]]


class RemoteServer:
    """A server whose agent was requested, or has joined. Same use as `LocalServer`.

    `Agents.serve` resolves the futures, in this order, but `ended` at any time; each once, none with an exception.
    """

    def __init__(
        self,
        socket: sockets.ControllerSocket,
        *,
        name: str,
        host: str,
        log_path: Path,
        start_id: str = "",
        launch: Launch | None = None,
    ) -> None:
        """log_path: of the server, in a folder that both hosts see.

        start_id: by which the agent is recognized, and launch: starts the command that starts it; both are missing of
        an agent that has joined.
        """
        loop = asyncio.get_running_loop()
        self.name, self.host, self.log_path, self.start_id = name, host, log_path, start_id
        self.identity: bytes | None = None
        """ZeroMQ's of its agent, from Hello on."""
        self.hello: asyncio.Future[messages.Hello] = loop.create_future()
        self.up: asyncio.Future[str] = loop.create_future()
        """URL of the server."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """How, as in "engine-3 (host b) REASON"."""
        self._socket, self._launch = socket, launch
        self._command: ChildProcess | None = None
        self._grace_s = STOP_S

    @property
    def where(self) -> str:
        """Part of an error message."""
        return f"host {self.host}"

    @property
    def reached(self) -> bool:
        """Whether the agent has connected: its host was there."""
        return self.hello.done()

    async def start(self) -> str:
        """Start the agent and wait until its server is up; its URL. Raises ServerEnded, and OSError."""
        assert self._command is None, "a server starts once"
        if self._launch is not None:
            self._command = await self._launch()
            try:
                async with asyncio.timeout(HELLO_S):
                    await self._unless_ended(self.hello)
            except TimeoutError:
                raise ServerEnded(
                    f"no message from the agent within {HELLO_S:g} s: the command that starts it hangs, or it does "
                    "not reach the controller"
                ) from None
        await self._unless_ended(self.up)
        return self.up.result()

    async def wait(self) -> str:
        """Wait until the server or its agent has ended; how."""
        if self._command is None:
            return await asyncio.shield(self.ended)
        async with race(self._command.wait(), asyncio.shield(self.ended)) as (command, _):
            if self.reached:  # the agent may outlive its command; a lost connection ends it (`Agents`)
                await asyncio.wait({self.ended})
            if self.ended.done():
                return self.ended.result()
            return f"lost the command that started its agent, which exited with code {command.result()}"

    def log_end(self) -> str:
        """The last lines of the server's log or, where the agent never connected, of the command's."""
        command = None if self.reached else self._command
        return log_end(self.log_path if command is None else command.log)

    def kill(self) -> None:
        """Let `stop` end the server by SIGKILL; does not wait."""
        self._grace_s = 0.0

    async def stop(self) -> None:
        """Let the agent end its server, then end the command. May be called twice.

        Raises RuntimeError if the agent is connected and does not report the end: the server may hold its devices.
        """
        answered = True
        try:
            if self.reached and not self.ended.done():
                await self.tell(messages.Stop(grace_s=self._grace_s))
                _, unfinished = await asyncio.wait({self.ended}, timeout=self._answer_s)
                answered = not unfinished
        finally:
            await self.forget()
            if self._command is not None:
                with contextlib.suppress(TimeoutError):  # the agent exits; a signal would look like a failure
                    await asyncio.wait_for(self._command.wait(), EXIT_S if answered and self.reached else 0.0)
                await self._command.stop(STOP_S)
        if not answered:
            raise RuntimeError(
                f"{self.name} (host {self.host}): its agent is connected and did not end the server within "
                f"{self._answer_s:g} s"
            )

    async def tell(self, message: messages.ToAgent) -> None:
        """Send the agent a message, if it is connected and reads its messages."""
        if self.identity is None or self.ended.done():
            return
        if not await self._socket.send(self.identity, sockets.encode(message), wait=False):
            self.end(DISCONNECTED)

    async def forget(self) -> None:
        """Refuse the agent from now on, connected or not; it ends its server then."""
        await self.tell(sockets.Refused(reason="the controller has given this start up"))
        self.end("was given up by the controller")

    def end(self, reason: str) -> None:
        """The agent has ended, for this reason. No effect if it has already."""
        if not self.ended.done():
            self.ended.set_result(reason)

    @property
    def _answer_s(self) -> float:
        """Longest time until the end of an agent is known (s): where it cannot be reached, its connection is given up
        after the heartbeats' time limit, as the agent does, which ends the server then."""
        return max(self._grace_s, sockets.HEARTBEAT_TIMEOUT_MS / 1000) + ANSWER_S

    async def _unless_ended(self, sign: asyncio.Future[Any]) -> None:
        """Wait for a sign of the agent. Raises ServerEnded if the agent or its command ends first."""
        async with race(self.wait(), asyncio.shield(sign)) as (ending, _):
            if not sign.done():
                raise ServerEnded(ending.result())

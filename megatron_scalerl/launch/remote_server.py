"""One vLLM server on another host, behind an agent (`engine.agent`). Runs in the controller.

The controller starts the agent by a command, such as ssh or srun, which is its child process, or the agent has joined
by itself. Either way the agent's connection (`engine.control`) says what becomes of the server: the command may end
while the agent goes on, and the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_scalerl.distributed import sockets
from megatron_scalerl.launch.control import AgentLink
from megatron_scalerl.launch.local_server import STOP_S, ServerEnded
from megatron_scalerl.processes.child_process import ChildProcess, log_end

logger = logging.getLogger(__name__)

HELLO_S = 120.0
"""Seconds from the start of an agent's command to its first message: for the step to be scheduled, and imports."""
ANSWER_S = 15.0
"""Seconds for an agent to report the end of its server, once that is due."""

EXIT_S = 5.0
"""Seconds for an agent that has reported the end of its server to exit."""

Launch = Callable[[], Awaitable[ChildProcess]]


class RemoteServer:
    """A `Server` behind an agent."""

    def __init__(
        self, link: Callable[[], AgentLink], *, name: str, host: str, launch: Launch | None, log_path: Path
    ) -> None:
        """link: called at the start; the agent that is expected then, or that has joined. host: its name.

        launch: starts the command that starts the agent, None for an agent that has joined. log_path: of the server,
        in a folder that both hosts see.
        """
        self.name, self.host, self.log_path = name, host, log_path
        self._make_link, self._launch = link, launch
        self._link: AgentLink | None = None
        self._command: ChildProcess | None = None
        self._grace_s = STOP_S

    @property
    def where(self) -> str:
        """Part of an error message."""
        return f"host {self.host}"

    @property
    def reached(self) -> bool:
        """Whether the agent has connected: its host was there."""
        return self._link is not None and self._link.hello.done()

    async def start(self) -> str:
        """Start the agent and wait until its server is up; its URL. Raises ServerEnded, and OSError."""
        assert self._link is None, "a server starts once"
        link = self._link = self._make_link()
        if self._launch is not None:
            self._command = await self._launch()
            try:
                async with asyncio.timeout(HELLO_S):
                    await self._unless_ended(link.hello)
            except TimeoutError:
                raise ServerEnded(
                    f"no message from the agent within {HELLO_S:g} s: the command that starts it hangs, or it does "
                    "not reach the controller"
                ) from None
        await self._unless_ended(link.up)
        return link.up.result()

    async def wait(self) -> str:
        """Wait until the server or its agent has ended; how."""
        assert self._link is not None, "started"
        ended = self._link.ended
        if self._command is None:
            return await asyncio.shield(ended)
        command = asyncio.create_task(self._command.wait())
        try:
            either: set[asyncio.Future[Any]] = {ended, command}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.reached:  # the agent may outlive its command; a lost connection ends it (`EngineRegistry`)
                await asyncio.wait({ended})
            if ended.done():
                return ended.result()
            return f"lost the command that started its agent, which exited with code {command.result()}"
        finally:
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)

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
        link = self._link
        if link is None:
            return
        answered = True
        try:
            if link.hello.done() and not link.ended.done():
                await link.stop(self._grace_s)
                _, unfinished = await asyncio.wait({link.ended}, timeout=self._answer_s)
                answered = not unfinished
        finally:
            await link.forget()
            if self._command is not None:
                with contextlib.suppress(TimeoutError):  # the agent exits; a signal would look like a failure
                    await asyncio.wait_for(self._command.wait(), EXIT_S if answered and link.hello.done() else 0.0)
                await self._command.stop(STOP_S)
        if not answered:
            raise RuntimeError(
                f"{self.name} (host {self.host}): its agent is connected and did not end the server within "
                f"{self._answer_s:g} s"
            )

    @property
    def _answer_s(self) -> float:
        """Longest time until the end of an agent is known (s): where it cannot be reached, its connection is given up
        after the heartbeats' time limit, as the agent does, which ends the server then."""
        return max(self._grace_s, sockets.HEARTBEAT_TIMEOUT_MS / 1000) + ANSWER_S

    async def _unless_ended(self, sign: asyncio.Future[Any]) -> None:
        """Wait for a sign of the agent. Raises ServerEnded if the agent or its command ends first."""
        assert self._link is not None
        ending = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({sign, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not sign.done():
                raise ServerEnded(ending.result())
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

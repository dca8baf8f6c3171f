"""The program that a run starts on another host: `python -m megatron_scalerl.launch.agent NAME`.

    trainer-HOST   the trainer's ranks on this host (with MSRL_RANKS)
    engine-3       one start of an engine that the controller starts, or of a teacher (teacher-NAME)
    extra-77-0     one start of an engine that joins (`megatron-scalerl engine --join RUN`)

Environment: `control_folder.public_environment`, and
    for ranks     the variables of `start_ranks`
    for engines   MSRL_DEVICES, number of devices; MSRL_START, id by which the controller recognizes a requested start
    optional      MSRL_BIND_HOST, address at which the server listens, else the address on the route to the controller

The ranks are child processes. When a rank fails, all other ranks of the host are ended, and the exit code is 1.
SIGTERM ends all ranks. Ranks exit without a signal when the controller disconnects.

An engine's agent connects to the controller, starts vLLM's server with TLS, reports that the server is up, and
waits. The exit code says how the agent ended:

    0   the controller sent Stop
    1   the server exited, or did not start
    3   the controller disconnected: the controller ended, or the network is gone (heartbeats)
    4   the controller refused the agent or did not answer, or the controller's secret did not appear in time

Messages, each one frame of at most LONGEST bytes (`distributed.sockets` has the connection):

    agent                          controller
    Hello           ------------>
                    <------------  Welcome, or Refused: exit
    Up              ------------>
    Exited          ------------>  (the server ended)
                    <------------  Stop (end the server)

Ranks and server die with this process (`processes.parent_death`), however the process ends.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import zmq.asyncio

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of, local_address
from megatron_scalerl.distributed.sockets import Buffer, Ping, Refused, decode
from megatron_scalerl.engine.certificate import Certificate
from megatron_scalerl.launch.caches import cache_variables
from megatron_scalerl.launch.control_folder import controller_address, find_secret
from megatron_scalerl.launch.local_server import LocalServer, ServerEnded, ServerPlace
from megatron_scalerl.processes.child_process import ChildProcess, log_end, race
from megatron_scalerl.processes.logs import log_to_stderr
from megatron_scalerl.processes.signals import Stopped, run_until_signal
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.client import BLAME_S

logger = logging.getLogger("megatron_scalerl.launch.agent")  # this name also if the module runs as __main__

_OTHER_RANKS_S = BLAME_S + 20.0
"""Seconds for the remaining ranks of the host to exit after a rank has failed. Afterwards these ranks are ended. Most
ranks exit when the connection to the failed rank is lost, the rest when the connection to the controller is lost."""
EXIT_FAILED = 1
LONGEST = 1 << 17
"""Largest size of a message (bytes). ZeroMQ closes the connection of a peer that sends a longer message."""
HOW_CHARACTERS = 1_000
"""Largest number of characters of `Exited.how`."""
_NAME = r"^(engine-[0-9]{1,6}|(teacher|extra)-[A-Za-z0-9._-]{1,64})$"
_URL = r"^https://(\[[0-9A-Fa-f:.%a-z]{2,64}\]|[0-9.]{7,15}):[0-9]{1,5}$"
JOINING = "extra-"
"""Prefix of the names of engines that join (`engine --join`). Engines that the controller starts are engine-N."""


class Hello(sockets.Hello, frozen=True):
    """The first message, from agent to controller."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    """Name of the engine: engine-N or teacher-... if the controller starts the engine, extra-... if the engine
    joins."""
    start: str
    """Id of this start of the engine, chosen by the controller; empty for an engine that joins."""
    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,255}$")]
    """Name of the agent's host."""
    devices: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Number of devices of the engine."""


class Welcome(sockets.Welcome, frozen=True):
    """Message from controller to agent: the agent is accepted and has to start the server."""

    certificate: str
    """The server's TLS certificate in PEM."""
    key: str
    """The certificate's private key in PEM; secret."""
    port: int = 0
    """Port of the server; 0 for any free port."""
    positions: Sequence[int] | None = None
    """The engine's devices, as indices into the host's visible GPUs; None without GPUs."""


class Up(sockets.Message, frozen=True):
    """Message from agent to controller: the server is up."""

    url: Annotated[str, msgspec.Meta(pattern=_URL)]
    """URL of the server: https://ADDRESS:PORT."""


class Exited(sockets.Message, frozen=True):
    """Message from agent to controller: the server has ended, and the agent will exit."""

    how: Annotated[str, msgspec.Meta(max_length=HOW_CHARACTERS)]
    """How the server ended, as the predicate after the engine's name: "exited with code 1"."""


class Stop(sockets.Message, frozen=True):
    """Message from controller to agent: end the server, then exit with 0."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """Seconds between SIGTERM and SIGKILL; 0 for SIGKILL at once."""


ToAgent = Welcome | Refused | Ping | Stop
ToController = Hello | Up | Exited

_to_agent = msgspec.msgpack.Decoder(ToAgent)
_to_controller = msgspec.msgpack.Decoder(ToController)


def decode_for_agent(frames: Sequence[Buffer]) -> ToAgent:
    """Decode a message of the controller. Raises InvalidMessage if the frames are not such a message."""
    return decode(_to_agent, frames)


def decode_for_controller(frames: Sequence[Buffer]) -> ToController:
    """Decode a message of an agent. Raises InvalidMessage if the frames are not such a message."""
    return decode(_to_controller, frames)


class Agent:
    """One start of an engine on this host. The caller calls `join` to connect to the controller, then `serve`."""

    link: sockets.ControllerLink
    welcome: Welcome | None = None
    """The controller's answer; None before `join`."""

    def __init__(self, name: str, environment: Mapping[str, str]):
        self._name = name
        self._environment = environment

    def join(self) -> None:
        """Send Hello and wait for the controller's answer. Raises RefusedError if refused or too late."""
        environment = self._environment
        self._secret = find_secret(environment, sockets.Purpose.ENGINES)
        self.link = sockets.ControllerLink(
            environment["MSRL_CONTROLLER"], self._secret, sockets.Purpose.ENGINES, decode_for_agent
        )
        hello = Hello(
            name=self._name,
            run_id=environment["MSRL_RUN_ID"],
            incarnation=environment["MSRL_INCARNATION"],
            start=environment["MSRL_START"],
            host=socket.gethostname(),
            devices=int(environment["MSRL_DEVICES"]),
        )
        self.welcome = self.link.greet(hello, sockets.GREETING_S)
        logger.info("%s: accepted by the controller at %s", self._name, self.link.endpoint)

    async def serve(self) -> int:
        """Run the server until the server exits or the controller ends it; returns the exit code.

        Raises RefusedError if the controller refuses the agent meanwhile.
        """
        self._connection = zmq.asyncio.Socket(self.link.socket)
        try:
            server = self._server()
        except (ValueError, OSError) as error:
            return await self._leave(_not_started(error), EXIT_FAILED)
        grace_s = 0.0
        reason = "was stopped"
        code = 0
        try:
            async with race(self._until_ended(server), self._until_stop()) as (server_end, stop):
                if server_end.done():
                    reason = server_end.result()
                    code = EXIT_FAILED
                else:
                    grace_s = stop.result()
        finally:
            await server.stop(grace_s)
        return await self._leave(reason, code)

    def _server(self) -> LocalServer:
        """Create the server object without starting the server. Raises ValueError and OSError."""
        assert self.welcome is not None, "joined"
        address = controller_address(self._environment)
        place = ServerPlace(
            host=self._environment.get("MSRL_BIND_HOST") or local_address(address),
            port=self.welcome.port,
            positions=self.welcome.positions,
            interface=interface_of(HostRendezvous(host=address, port=0)),
            tls=Certificate(certificate=self.welcome.certificate, key=self.welcome.key),
        )
        recipe = load_recipe(self._environment["MSRL_RECIPE"]).of_engine(self._name)
        log = Path(self._environment["MSRL_LOGS"]) / f"{self._name}.log"
        return LocalServer(recipe, place, name=self._name, secret=self._secret, log_path=log)

    async def _until_ended(self, server: LocalServer) -> str:
        """Start the server and wait until the server ends; returns why the server ended or did not start."""
        try:
            await self._send(Up(url=await server.start()))
            return await server.wait()
        except ServerEnded as error:
            return str(error)
        except (ValueError, RuntimeError, OSError) as error:
            return _not_started(error)

    async def _until_stop(self) -> float:
        """Wait for the message Stop; returns the seconds between SIGTERM and SIGKILL. May raise RefusedError."""
        while True:
            message = self.link.understood(await self._connection.recv_multipart())
            if isinstance(message, Stop):
                return message.grace_s

    async def _send(self, message: ToController) -> None:
        await self._connection.send(sockets.encode(message))

    async def _leave(self, reason: str, code: int) -> int:
        """Tell the controller how the server ended, and return this process's exit code."""
        if code:
            logger.error("the server %s", reason)
        self.link.leave()
        await self._send(Exited(how=reason))
        return code


def _not_started(error: Exception) -> str:
    return f"did not start: {' '.join(str(error).split())}"[:HOW_CHARACTERS]


async def start_ranks(environment: Mapping[str, str], logs: Path, threads: int) -> AsyncIterator[ChildProcess]:
    """Start the ranks of this host, which join the trainer that `environment` names.

    environment: the variables of `trainer.worker`, with MSRL_RANKS (FIRST:COUNT) in place of RANK. The variables
    replace variables of this process with equal names. threads: trainer.threads.
    """
    first, count = map(int, environment["MSRL_RANKS"].split(":"))
    for number in range(count):
        name = f"trainer-{first + number}"
        numbers = {
            "RANK": str(first + number),
            "LOCAL_RANK": str(number),
            "OMP_NUM_THREADS": str(threads),
            # Megatron-Core would warn at every import that Transformer Engine and apex are not installed.
            "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning",
        }
        argv = [sys.executable, "-m", "megatron_scalerl.trainer.worker"]
        yield await ChildProcess.start(
            name, argv, {**os.environ, **environment, **numbers, **cache_variables(name)}, logs / f"{name}.log"
        )


async def serve_ranks(environment: Mapping[str, str], secret: str) -> int:
    """Start the host's ranks, wait until all have exited, and return the exit code. Raises OSError."""
    threads = load_recipe(environment["MSRL_RECIPE"]).trainer.threads
    address = local_address(controller_address(environment))
    environment = {**environment, "MSRL_SECRET": secret, "MSRL_BIND_HOST": address}
    ranks = []
    try:
        async for rank in start_ranks(environment, Path(environment["MSRL_LOGS"]), threads):
            ranks.append(rank)
        exits = {asyncio.create_task(rank.wait()): rank for rank in ranks}
        for first in asyncio.as_completed(exits):
            if await first:
                # as_completed does not return the task, so the failed task is searched for.
                failed, code = next((exits[task], task.result()) for task in exits if task.done() and task.result())
                logger.error("%s exited with code %d%s", failed.name, code, log_end(failed.log))
                # The remaining ranks get time to exit and to report by themselves: the controller blames the failure
                # on a rank that exits without a report, and a rank that is ended here cannot report.
                await asyncio.wait(exits, timeout=_OTHER_RANKS_S)
                return EXIT_FAILED
        return 0
    finally:
        await asyncio.gather(*(rank.stop() for rank in ranks))


def main() -> int:
    """Run the host's ranks, or one start of an engine. Returns the exit code.

    For an engine that the controller accepted, this function does not return but ends the process.
    """
    log_to_stderr()
    agent = Agent(sys.argv[1], os.environ)
    try:
        if sys.argv[1].startswith("trainer-"):
            secret = find_secret(os.environ, sockets.Purpose.TRAINER)
            return run_until_signal(serve_ranks(os.environ, secret))
        agent.join()
        code = run_until_signal(agent.serve())
    except Stopped as stopped:
        code = stopped.exit_code
    except sockets.RefusedError as error:
        logger.error("%s", error)
        code = sockets.EXIT_REFUSED
    except (RuntimeError, ValueError, OSError) as error:
        logger.error("%s", error)
        code = EXIT_FAILED
    if agent.welcome is not None:
        agent.link.exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""One start of one engine on a host other than the controller's: `python -m megatron_scalerl.launch.agent`.

    RUN --name engine-3 --start ID --incarnation I    started by the controller
    RUN --name extra-77-0                             joins the run (`megatron-scalerl engine --join RUN`)

The agent connects to the controller, starts vLLM's server with TLS at this host's address on the route to it, reports
that it is up, and waits. Its exit code says how it ended:

    0   the controller let it stop
    1   the server exited, or did not start
    3   the controller disconnected: it ended, or the network is gone (heartbeats); the server is killed at once
    4   the controller refused it, or did not answer

The server dies with the agent (`processes.parent_death`), however that ends. It writes RUN/logs/NAME.log itself.
MSRL_BIND_HOST: address of this host at which the server listens, in place of the one on the route.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of, own_address
from megatron_scalerl.engine.certificate import Certificate, certificate_files
from megatron_scalerl.launch import agent_messages as messages
from megatron_scalerl.launch.control_folder import ControllerFile, read_controller, secret_file
from megatron_scalerl.launch.local_server import STOP_S, LocalServer, ServerEnded, ServerPlace
from megatron_scalerl.processes.logs import NAME_VARIABLE, log_to_stderr
from megatron_scalerl.processes.secret_file import read_secret
from megatron_scalerl.processes.signals import Stopped, run_until_signal
from megatron_scalerl.recipe.file import load_recipe

logger = logging.getLogger("megatron_scalerl.launch.agent")  # also where this module is __main__

GREETING_S = 60.0
"""Seconds for the controller to answer. With a wrong secret it never does."""
_READ_AGAIN_S = 2.0
"""Interval at which RUN/control is read again while no controller answers (seconds)."""
EXIT_SERVER, EXIT_ORPHAN, EXIT_REFUSED = 1, 3, 4


class RefusedError(RuntimeError):
    """The controller did not accept this agent, or gave it up."""


class ControllerLink:
    """The agent's socket to its controller. Needs a running event loop."""

    def __init__(self, endpoint: str, secret: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.LONGEST)
        sockets.secure_client(self._socket, secret, sockets.Purpose.ENGINES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    async def send(self, message: Any) -> None:
        """Queue a message."""
        await self._socket.send(messages.encode(message))

    async def answered(self, seconds: float) -> bool:
        """Whether a message arrives within this time."""
        return bool(await self._socket.poll(int(seconds * 1000)))

    async def receive(self) -> messages.Welcome | messages.Stop:
        """The next message other than a Ping. Raises RefusedError."""
        while True:
            message = messages.decode_for_agent(await self._socket.recv_multipart())
            if isinstance(message, messages.Refused):
                raise RefusedError(f"controller at {self.endpoint} refused this agent: {message.reason}")
            if not isinstance(message, messages.Ping):
                return message

    async def until_disconnected(self) -> None:
        """Wait until the connection is lost: the controller ended, or heartbeats fail to arrive."""
        await recv_monitor_message(self._monitor)

    async def until_stop(self) -> float:
        """Wait for Stop; seconds between SIGTERM and SIGKILL. Raises RefusedError."""
        while not isinstance(message := await self.receive(), messages.Stop):
            pass
        return message.grace_s

    def close(self, linger_ms: int = 2_000) -> None:
        """Deliver what is queued, for up to `linger_ms`, and close."""
        self._context.destroy(linger=linger_ms)


async def run_agent(arguments: argparse.Namespace) -> int:
    """One start of the engine, until it ends; the exit code. Raises RefusedError."""
    run = Path(arguments.run).absolute()
    link, controller, secret = await _join(run, arguments)
    try:
        welcome = await link.receive()
        assert isinstance(welcome, messages.Welcome), welcome
        logger.info("%s: accepted by the controller at %s", arguments.name, link.endpoint)
        return await _Engine(link).run(partial(_server, run, arguments, controller, secret, welcome))
    finally:
        link.close()


class _Engine:
    """The server of this agent, and its controller's messages about it."""

    def __init__(self, link: ControllerLink) -> None:
        self._link = link
        self._server: LocalServer | None = None

    async def run(self, server: Callable[[], AbstractContextManager[LocalServer]]) -> int:
        """Run the server until it or the controller ends it; the agent's exit code. Raises RefusedError.

        server: a server that has not started, and within the block the files that it reads while it starts.
        """
        serving = asyncio.create_task(self._serve(server))
        stop = asyncio.create_task(self._link.until_stop())
        orphaned = asyncio.create_task(self._link.until_disconnected())
        tasks: list[asyncio.Task[Any]] = [serving, stop, orphaned]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                return serving.result()
            serving.cancel()  # the end of the server is not its own from here on
            await asyncio.gather(serving, return_exceptions=True)
            if orphaned.done():
                logger.error("controller at %s: disconnected; the server is killed", self._link.endpoint)
                await self._end(0.0)
                return EXIT_ORPHAN
            code = await self._end(stop.result())
            await self._link.send(messages.Exited(code=code))
            return 0
        except BaseException:
            await self._end(0.0)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, make: Callable[[], AbstractContextManager[LocalServer]]) -> int:
        """Start the server and wait for its end; the controller gets to know both."""
        code: int | None = None
        reason = ""
        try:
            with make() as server:
                self._server = server
                url = await server.start()
            await self._link.send(messages.Up(url=url))
            code = await server.exit_code()
        except ServerEnded:
            code = await server.exit_code()
        except (ValueError, RuntimeError, OSError) as error:
            reason = f"did not start: {error}"
        logger.error("the server %s", reason or f"exited with code {code}")
        await self._end(0.0)
        reason = " ".join(reason.split())[: messages.REASON_CHARACTERS]
        await self._link.send(messages.Exited(code=code, reason=reason))
        return EXIT_SERVER

    async def _end(self, grace_s: float) -> int | None:
        """End the server with all its processes; its exit code, None if it was not started."""
        server = self._server
        if server is None or not server.started:
            return None
        if not grace_s:
            server.kill()
        await server.stop(grace_s or STOP_S)
        return await server.exit_code()


async def _join(run: Path, arguments: argparse.Namespace) -> tuple[ControllerLink, ControllerFile, str]:
    """A link on which the controller has answered Hello. Raises RefusedError without an answer.

    The files are read again and again meanwhile: a shared file system may show those of an earlier start for a while.
    """
    used: tuple[ControllerFile, str] | None = None
    link: ControllerLink | None = None
    end = asyncio.get_running_loop().time() + GREETING_S
    missing = ""
    while asyncio.get_running_loop().time() < end:
        try:
            found = _files(run, arguments.incarnation)
        except (ValueError, OSError) as error:
            missing, found = f": {error}", None
        if found is not None and found != used:
            if link is not None:
                link.close(0)
            used, (controller, secret) = found, found
            link = ControllerLink(controller.engines, secret)
            await link.send(_hello(arguments, controller))
        if link is None:
            await asyncio.sleep(_READ_AGAIN_S)
        elif await link.answered(_READ_AGAIN_S):
            return link, controller, secret
    if link is not None:
        link.close(0)
        missing = f" at {link.endpoint} (it has exited, or its secret is another one)"
    raise RefusedError(f"controller of {run}: expected an answer within {GREETING_S:g} s, found none{missing}")


def _files(run: Path, incarnation: str) -> tuple[ControllerFile, str]:
    """What RUN/control says. Raises ValueError and OSError, also if it is about another start of the controller."""
    controller = read_controller(run)
    if incarnation not in ("", controller.incarnation):
        raise ValueError(f"{run}: expected the controller {incarnation}, found {controller.incarnation}")
    return controller, read_secret(secret_file(run))


def _hello(arguments: argparse.Namespace, controller: ControllerFile) -> messages.Hello:
    return messages.Hello(
        name=arguments.name,
        run_id=controller.run_id,
        incarnation=controller.incarnation,
        start=arguments.start,
        host=socket.gethostname(),
        devices=arguments.devices,
    )


@contextlib.contextmanager
def _server(
    run: Path,
    arguments: argparse.Namespace,
    controller: ControllerFile,
    secret: str,
    welcome: messages.Welcome,
) -> Iterator[LocalServer]:
    """The server, not started, with its certificate in files. Raises ValueError and OSError."""
    recipe = load_recipe(controller.recipe_file)
    address = controller.engines.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    positions = arguments.gpus
    if positions is None and welcome.transport == "nccl":
        positions = list(range(arguments.devices))
    certificate = Certificate(certificate=welcome.certificate, key=welcome.key)
    with certificate_files(certificate) as files:
        place = ServerPlace(
            host=os.environ.get("MSRL_BIND_HOST") or own_address(address),
            port=arguments.port,
            devices=None if positions is None else _devices_at(positions),
            interface=interface_of(HostRendezvous(host=address, port=0)),
            tls=files,
        )
        log = run / "logs" / f"{arguments.name}.log"
        yield LocalServer(recipe, place, name=arguments.name, secret=secret, log_path=log)


def _devices_at(positions: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES with those of this process's GPUs. Raises ValueError if it has fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(max(positions) + 1)]
    if max(positions) >= len(names):
        raise ValueError(f"CUDA_VISIBLE_DEVICES: expected at least {max(positions) + 1} GPUs, found {visible}")
    return ",".join(names[position] for position in positions)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Start one engine of a run on this host.")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--name", required=True, help="engine-N, or extra-... for an engine that joins")
    parser.add_argument("--start", default="", help="identifies this start, by the controller that requested it")
    parser.add_argument("--incarnation", default="", help="of that controller; the run's current one without")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="devices of the engine")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument(
        "--gpus", type=lambda text: [int(part) for part in text.split(",")], metavar="0,1", help="indices of its GPUs"
    )
    return parser


def main() -> int:
    """Run the agent. Returns the exit code."""
    arguments = _parser().parse_args()
    os.environ.setdefault(NAME_VARIABLE, arguments.name)
    log_to_stderr()
    try:
        return run_until_signal(run_agent(arguments))
    except Stopped as stopped:
        return stopped.exit_code
    except RefusedError as error:
        logger.error("%s", error)
        return EXIT_REFUSED
    except (RuntimeError, OSError) as error:
        logger.error("%s", error)
        return EXIT_SERVER


if __name__ == "__main__":
    sys.exit(main())

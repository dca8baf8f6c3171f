"""One start of one engine on a host other than the controller's: `python -m megatron_scalerl.launch.agent`.

    RUN --name engine-3 --start ID --incarnation I    started by the controller
    RUN --name extra-77-0                             joins the run (`megatron-scalerl engine --join RUN`)

The agent connects to the controller, starts vLLM's server with TLS at this host's address on the route to it, reports
that it is up, and waits. Its exit code says how it ended:

    0   the controller let it stop
    1   the server exited, or did not start
    3   the controller disconnected: it ended, or the network is gone (heartbeats)
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq.asyncio

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

_READ_AGAIN_S = 2.0
"""Interval at which RUN/control is read again while no controller answers (seconds)."""
EXIT_SERVER = 1


class Agent:
    """The server of this process, and its controller's messages about it. Needs a running event loop."""

    def __init__(self, link: sockets.ControllerLink) -> None:
        self._link = link
        self._socket = zmq.asyncio.Socket(link.socket)

    async def run(self, server: LocalServer, files: contextlib.ExitStack) -> int:
        """Run the server until it or the controller ends it; the exit code. Raises RefusedError.

        files: those that the server reads while it starts.
        """
        serving = asyncio.create_task(self._serve(server, files))
        stop = asyncio.create_task(self._until_stop())
        tasks: list[asyncio.Task[Any]] = [serving, stop]
        grace_s, reason = 0.0, ""
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                reason = serving.result()
            else:
                grace_s = stop.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not grace_s:
                server.kill()
            await server.stop(grace_s or STOP_S)
        code = await server.exit_code() if server.started else None
        if serving.cancelled():
            await self._send(messages.Exited(code=code))
            return 0
        logger.error("the server %s", reason or f"exited with code {code}")
        await self._send(messages.Exited(code=code, reason=reason))
        return EXIT_SERVER

    async def _serve(self, server: LocalServer, files: contextlib.ExitStack) -> str:
        """Start the server and wait for its end; why it was not started, or empty."""
        try:
            url = await server.start()
            files.close()
            await self._send(messages.Up(url=url))
            await server.exit_code()
        except ServerEnded:
            return ""
        except (RuntimeError, OSError) as error:
            return messages.not_started(error)
        return ""

    async def _until_stop(self) -> float:
        """Wait for Stop; seconds between SIGTERM and SIGKILL. Raises RefusedError."""
        while True:
            message = self._link.understood(await self._socket.recv_multipart())
            if isinstance(message, messages.Stop):
                return message.grace_s

    async def _send(self, message: messages.ToController) -> None:
        await self._socket.send(sockets.encode(message))


def join(run: Path, arguments: argparse.Namespace) -> tuple[sockets.ControllerLink, ControllerFile, str, Any]:
    """A connection, the controller and its secret, and its answer to Hello. Raises RefusedError without one.

    The files are read again and again meanwhile: a shared file system may show those of an earlier start for a while.
    """
    used: tuple[ControllerFile, str] | None = None
    link: sockets.ControllerLink | None = None
    end = time.monotonic() + sockets.GREETING_S
    missing = ""
    while time.monotonic() < end:
        try:
            found = _files(run, arguments.incarnation)
        except (ValueError, OSError) as error:
            missing, found = f": {error}", None
        if found is not None and found != used:
            if link is not None:
                link.abandon()
            used, (controller, secret) = found, found
            link = sockets.ControllerLink(
                controller.engines, secret, sockets.Purpose.ENGINES, messages.decode_for_agent
            )
            link.send(_hello(arguments, controller))
        if link is None:
            time.sleep(_READ_AGAIN_S)
        elif (welcome := link.greet(_READ_AGAIN_S)) is not None:
            return link, controller, secret, welcome
    if link is not None:
        link.abandon()
        missing = f" at {link.endpoint} (it has exited, or its secret is another one)"
    raise sockets.RefusedError(
        f"controller of {run}: expected an answer within {sockets.GREETING_S:g} s, found none{missing}"
    )


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


async def serve(
    run: Path,
    arguments: argparse.Namespace,
    link: sockets.ControllerLink,
    controller: ControllerFile,
    secret: str,
    welcome: messages.Welcome,
) -> int:
    """One start of the engine, until it ends; the exit code. Raises RefusedError."""
    address = controller.engines.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    positions = arguments.gpus
    if positions is None and welcome.transport == "nccl":
        positions = list(range(arguments.devices))
    certificate = Certificate(certificate=welcome.certificate, key=welcome.key)
    with contextlib.ExitStack() as files:
        try:
            place = ServerPlace(
                host=os.environ.get("MSRL_BIND_HOST") or own_address(address),
                port=arguments.port,
                devices=None if positions is None else _devices_at(positions),
                interface=interface_of(HostRendezvous(host=address, port=0)),
                tls=files.enter_context(certificate_files(certificate)),
            )
            log = run / "logs" / f"{arguments.name}.log"
            server = LocalServer(
                load_recipe(controller.recipe_file), place, name=arguments.name, secret=secret, log_path=log
            )
        except (ValueError, OSError) as error:
            reason = messages.not_started(error)
            logger.error("the server %s", reason)
            link.send(messages.Exited(reason=reason))
            return EXIT_SERVER
        return await Agent(link).run(server, files)


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
    """Run the agent. Returns the exit code of one that the controller does not accept; others end here."""
    arguments = _parser().parse_args()
    run = Path(arguments.run).absolute()
    os.environ.setdefault(NAME_VARIABLE, arguments.name)
    log_to_stderr()
    try:
        link, controller, secret, welcome = join(run, arguments)
    except sockets.RefusedError as error:
        logger.error("%s", error)
        return sockets.EXIT_REFUSED
    logger.info("%s: accepted by the controller at %s", arguments.name, link.endpoint)
    code = EXIT_SERVER
    try:
        code = run_until_signal(serve(run, arguments, link, controller, secret, welcome))
    except Stopped as stopped:
        code = stopped.exit_code
    except sockets.RefusedError as error:
        logger.error("%s", error)
        code = sockets.EXIT_REFUSED
    except (RuntimeError, OSError) as error:
        logger.error("%s", error)
    link.exit(code)


if __name__ == "__main__":
    sys.exit(main())

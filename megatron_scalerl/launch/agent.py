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
import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path

import zmq.asyncio

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, interface_of, own_address
from megatron_scalerl.engine.certificate import Certificate, certificate_files
from megatron_scalerl.launch import agent_messages as messages
from megatron_scalerl.launch.control_folder import ControllerFile, read_controller, secret_file
from megatron_scalerl.launch.local_server import STOP_S, LocalServer, ServerEnded, ServerPlace, gpus_at
from megatron_scalerl.launch.own_share import SHARE
from megatron_scalerl.launch.race import race
from megatron_scalerl.processes.logs import NAME_VARIABLE, log_to_stderr
from megatron_scalerl.processes.secret_file import read_secret
from megatron_scalerl.processes.signals import Stopped, run_until_signal
from megatron_scalerl.recipe.file import load_recipe

logger = logging.getLogger("megatron_scalerl.launch.agent")  # also where this module is __main__

_READ_AGAIN_S = 2.0
"""Interval at which RUN/control is read again while no controller answers (seconds)."""
EXIT_SERVER = 1


class Agent:
    """One start of one engine: `join` its controller, then `serve`."""

    link: sockets.ControllerLink
    _controller: ControllerFile
    _secret: str
    _welcome: messages.Welcome
    _connection: zmq.asyncio.Socket
    """The link's socket on the event loop."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._run = Path(arguments.run).absolute()

    def join(self) -> None:
        """Find the controller, and wait for its answer to Hello. Raises RefusedError without one.

        RUN/control is read again and again meanwhile: a shared file system may show the files of an earlier start for
        a while.
        """
        used: tuple[ControllerFile, str] | None = None
        end = time.monotonic() + sockets.GREETING_S
        missing = ""
        while time.monotonic() < end:
            try:
                found = self._files()
            except (ValueError, OSError) as error:
                missing, found = f": {error}", None
            if found is not None and found != used:
                if used is not None:
                    self.link.abandon()
                used = self._controller, self._secret = found
                self._greet()
            if used is None:
                time.sleep(_READ_AGAIN_S)
            elif (welcome := self.link.greet(_READ_AGAIN_S)) is not None:
                self._welcome = welcome
                return
        if used is not None:
            self.link.abandon()
            missing = f" at {self.link.endpoint} (it has exited, or its secret is another one)"
        raise sockets.RefusedError(
            f"controller of {self._run}: expected an answer within {sockets.GREETING_S:g} s, found none{missing}"
        )

    def _files(self) -> tuple[ControllerFile, str]:
        """What RUN/control says. Raises ValueError, also for another start of the controller, and OSError."""
        controller, wanted = read_controller(self._run), self._arguments.incarnation
        if wanted not in ("", controller.incarnation):
            raise ValueError(f"{self._run}: expected the controller {wanted}, found {controller.incarnation}")
        return controller, read_secret(secret_file(self._run))

    def _greet(self) -> None:
        """Connect to the controller of these files, and send Hello."""
        self.link = sockets.ControllerLink(
            self._controller.engines, self._secret, sockets.Purpose.ENGINES, messages.decode_for_agent
        )
        hello = messages.Hello(
            name=self._arguments.name,
            run_id=self._controller.run_id,
            incarnation=self._controller.incarnation,
            start=self._arguments.start,
            host=socket.gethostname(),
            devices=self._arguments.devices,
        )
        self.link.send(hello)

    async def serve(self) -> int:
        """Run the server until it or the controller ends it; the exit code. Raises RefusedError."""
        self._connection = zmq.asyncio.Socket(self.link.socket)
        with contextlib.ExitStack() as files:
            try:
                server = self._server(files)
            except (ValueError, OSError) as error:
                return await self._leave(None, messages.not_started(error))
            grace_s, reason = 0.0, None
            try:
                async with race(self._until_ended(server, files), self._until_stop()) as (serving, stop):
                    if serving.done():
                        reason = serving.result()
                    else:
                        grace_s = stop.result()
            finally:
                if not grace_s:
                    server.kill()
                await server.stop(grace_s or STOP_S)
        return await self._leave(await server.exit_code() if server.started else None, reason)

    def _server(self, files: contextlib.ExitStack) -> LocalServer:
        """The server, not started. files: gets those that it reads while it starts. Raises ValueError and OSError."""
        address = self._controller.engines.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        positions = self._arguments.gpus
        if positions is None and self._welcome.transport == "nccl":
            positions = list(range(self._arguments.devices))
        certificate = Certificate(certificate=self._welcome.certificate, key=self._welcome.key)
        place = ServerPlace(
            host=os.environ.get("MSRL_BIND_HOST") or own_address(address),
            port=self._arguments.port,
            devices=gpus_at(positions),
            share=os.environ.get(SHARE, ""),
            interface=interface_of(HostRendezvous(host=address, port=0)),
            tls=files.enter_context(certificate_files(certificate)),
        )
        recipe, name = load_recipe(self._controller.recipe_file), self._arguments.name
        log = self._run / "logs" / f"{name}.log"
        return LocalServer(recipe, place, name=name, secret=self._secret, log_path=log)

    async def _until_ended(self, server: LocalServer, files: contextlib.ExitStack) -> str:
        """Start the server and wait for its end; why it was not started, or empty."""
        try:
            url = await server.start()
            files.close()
            await self._send(messages.Up(url=url))
            await server.exit_code()
        except ServerEnded:
            return ""
        except (ValueError, RuntimeError, OSError) as error:
            return messages.not_started(error)
        return ""

    async def _until_stop(self) -> float:
        """Wait for Stop; seconds between SIGTERM and SIGKILL. Raises RefusedError."""
        while True:
            message = self.link.understood(await self._connection.recv_multipart())
            if isinstance(message, messages.Stop):
                return message.grace_s

    async def _send(self, message: messages.ToController) -> None:
        await self._connection.send(sockets.encode(message))

    async def _leave(self, code: int | None, reason: str | None) -> int:
        """Tell the controller how the server ended; this process's exit code.

        code: the server's. reason: why it was not started, empty where it exited, None where the controller let it
        stop.
        """
        if reason is not None:
            logger.error("the server %s", reason or f"exited with code {code}")
        self.link.leave()
        await self._send(messages.Exited(code=code, reason=reason or ""))
        return 0 if reason is None else EXIT_SERVER


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
    agent = Agent(arguments := _parser().parse_args())
    os.environ.setdefault(NAME_VARIABLE, arguments.name)
    log_to_stderr()
    try:
        agent.join()
    except sockets.RefusedError as error:
        logger.error("%s", error)
        return sockets.EXIT_REFUSED
    logger.info("%s: accepted by the controller at %s", arguments.name, agent.link.endpoint)
    try:
        code = run_until_signal(agent.serve())
    except Stopped as stopped:
        code = stopped.exit_code
    except (RuntimeError, OSError) as error:
        logger.error("%s", error)
        code = sockets.EXIT_REFUSED if isinstance(error, sockets.RefusedError) else EXIT_SERVER
    agent.link.exit(code)


if __name__ == "__main__":
    sys.exit(main())

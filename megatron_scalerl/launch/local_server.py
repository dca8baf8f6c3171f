"""A vLLM server as a child process. Runs in the controller and, on other hosts, in the engine's agent.

    __init__: bind the address --> start: spawn, wait for the plugin's byte --> wait: for the exit --> stop

The parent binds the server's address and passes the listening socket to the server (`engine.server`), so that no
program can take the chosen port before the server uses the port. Once up, the server writes a byte to a pipe
(`engine.vllm_plugin`). The server leads a process group, so that vLLM's core and workers are stopped with the server.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from megatron_scalerl.distributed.rendezvous import LOOPBACK, private_folder
from megatron_scalerl.engine.certificate import Certificate, certificate_arguments
from megatron_scalerl.engine.options import engine_arguments, engine_command, engine_environment
from megatron_scalerl.launch.caches import cache_variables
from megatron_scalerl.processes.child_process import ChildProcess, race
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.process_sections import EngineSection
from megatron_scalerl.record import record

STOP_S = 20.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""
_BACKLOG = 2048


class ServerEnded(RuntimeError):
    """The server ended before being up. The message is the predicate of a sentence after "engine-0 (port 8000)"."""


@record
class ServerPlace:
    """Where a server runs: address, devices, interface and certificate."""

    host: str
    """Address of this host at which the server listens."""
    port: int = 0
    """Port of the server; 0 for any free port."""
    positions: Sequence[int] | None = None
    """The server's devices, as indices into this host's visible GPUs; None without GPUs."""
    interface: str = LOOPBACK
    """Name of the network interface through which NCCL connects trainer and engines for weight updates."""
    tls: Certificate | None = None
    """Certificate and key of the server; None for HTTP without TLS, as on the loopback interface."""


class LocalServer:
    """A vLLM server that is a child of this process. The caller may call `start` once, and `stop` at any time."""

    reached = True
    """Whether the server's host was reachable: always True, since the server runs on this host."""
    tls = None

    def __init__(self, recipe: Recipe, place: ServerPlace, *, name: str, secret: str, log_path: str | Path):
        """Bind the address. Raises ValueError for an option unknown to vLLM and for a port in use."""
        self.name = name
        self.log_path = Path(log_path)
        self._recipe = recipe
        self._place = place
        self._secret = secret
        self._devices = gpus_at(place.positions)
        self._socket = bind_server(place.host, place.port)
        self.port: int = self._socket.getsockname()[1]
        self.location = f"port {self.port}"
        """Where the server is, for error messages."""
        try:
            self._arguments = engine_arguments(recipe, host=place.host, port=self.port)
        except BaseException:
            self._socket.close()
            raise
        self._process: ChildProcess | None = None
        # A private folder for vLLM's sockets, which vLLM does not delete.
        self._folder = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        """Process id of the server, which is also the id of the server's process group."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self) -> str:
        """Start the process, wait until the server is up, and return the server's URL.

        Raises ServerEnded if the server exits before being up, and OSError if the process cannot be started.
        """
        assert self._process is None, "start() may be called once only"
        # The files of the certificate exist until the server is up, and so has read the files.
        with certificate_arguments(self._place.tls) as files:
            await self._launch([*self._arguments, *files])
        host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
        scheme = "https" if self._place.tls else "http"
        return f"{scheme}://{host}:{self.port}"

    async def wait(self) -> str:
        """Wait until the process has exited, and return "exited with code N"."""
        assert self._process is not None, "started"
        return f"exited with code {await self._process.wait()}"

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End all processes of the server by SIGTERM, and by SIGKILL after `grace_s` seconds. May be called twice."""
        self._socket.close()
        if self._process is not None:
            await self._process.stop(grace_s)
        self._folder.close()

    async def _launch(self, arguments: list[str]) -> None:
        """Start the process, and wait until the server reports on a pipe to be up."""
        read, write = os.pipe()
        listening = self._socket.fileno()
        env = engine_environment(
            self._recipe,
            secret=self._secret,
            ready_fd=write,
            listen_fd=listening,
            devices=self._devices,
            interface=self._place.interface,
        )
        env |= cache_variables(self.name)
        env["VLLM_RPC_BASE_PATH"] = self._folder.enter_context(private_folder()).folder
        command = engine_command(arguments)
        try:
            self._process = await ChildProcess.start(
                self.name, command, env, self.log_path, pass_fds=(write, listening)
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
            # Only the server has the listening socket now, so connections are refused once the server has exited.
            self._socket.close()
        await self._ready(read)

    async def _ready(self, read: int) -> None:
        """Wait for the byte that the plugin writes when the server is up. May raise ServerEnded."""
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
        )
        try:
            async with race(self.wait(), reader.read(1)) as (server_exit, up):
                # An end of file without a byte shows that the process is exiting.
                if not up.done() or not up.result():
                    raise ServerEnded(f"{await server_exit} before it was up")
        finally:
            pipe.close()


def gpus_at(positions: Sequence[int] | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that selects the GPUs at these positions; empty with None, for CPUs.

    Raises ValueError if this process sees fewer GPUs.
    """
    if positions is None:
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(positions) + 1)))
    names = visible.split(",")
    if max(positions) >= len(names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES: {visible} names fewer GPUs than the {max(positions) + 1} that the run takes"
        )
    return ",".join(names[position] for position in positions)


def engine_port(engine: EngineSection, index: int) -> int:
    """Port of engine `index`, different for each engine; 0 means any free port."""
    return engine.port + index if engine.port else 0


def bind_server(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; port 0 takes a free port.

    Raises ValueError if the port is in use or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as err:
        if err.errno != errno.EADDRINUSE:
            raise ValueError(f"engine.host: {host} is not an address of this machine ({err})") from None
        raise ValueError(f"engine.port: {host}:{port} is in use; choose a free port") from None

"""Starts, watches and stops one vLLM server process. Runs in the controller.

The controller binds the server's address and passes the listening socket on (`engine.server`), so that nobody takes
a free port between its choice and its use. The server reports through a pipe that it is up (`engine.vllm_plugin`).
Its exit is awaited, its progress watched (`engine.watchdog`), and its output goes to a log file whose last lines are
part of the error when it dies. It leads its own process group, so that its core and its workers stop with it. A
server that ended is not started again: another `EngineProcess` is (`launch.engines`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any, NoReturn

import tenacity

from megatron_scalerl.engine.answers import EngineError, EngineInfo
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.numerics import check_engine
from megatron_scalerl.engine.options import engine_arguments, engine_command, engine_environment
from megatron_scalerl.engine.watchdog import EngineDied, LagClock, watch_progress
from megatron_scalerl.processes.child_process import ChildProcess, log_end
from megatron_scalerl.recipe import Recipe

_STOP_S = 20.0
_BACKLOG = 2048


class EngineProcess:
    """One vLLM server. `start` it, then use `client`; `watch` never returns; `stop` may be called at any time."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        index: int = 0,
        secret: str,
        log_path: str | Path,
        transport: str,
        devices: str | None = None,
    ) -> None:
        """index: number of the engine from 0. transport: gloo or nccl. devices: its CUDA_VISIBLE_DEVICES.

        Binds the server's address. Raises ValueError for an option that vLLM does not know and for a port in use.
        """
        engine = recipe.engine
        self._recipe, self._secret = recipe, secret
        self._devices = devices
        self.name = f"engine-{index}"
        self.log_path = Path(log_path)
        self._socket = bind_server(engine.host, engine.port + index if engine.port else 0)
        self.port: int = self._socket.getsockname()[1]
        self._arguments = engine_arguments(recipe, host=engine.host, port=self.port, transport=transport)
        host = f"[{engine.host}]" if ":" in engine.host else engine.host
        self.client = EngineClient(url=f"http://{host}:{self.port}", secret=secret, name=self.name, settings=engine)
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """Process id of the server, also the id of its process group."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self, *, version: int = 0) -> EngineInfo:
        """Start the server, wait until it answers, label its weights with `version`, and check it.

        Raises EngineDied if it exits or takes longer than engine.start_timeout_s, EngineError and ValueError if it
        does not compute what the recipe says (see `check_engine`). It is stopped first.
        """
        assert self._process is None, "an engine starts once"
        limit = self._recipe.engine.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._ready(await self._launch())
                await self._first_answer()
                await self.client.set_version(version)
                info = await self.client.info()
            check_engine(info, self._recipe)
        except BaseException as error:
            late = self._died(f"was not up within {limit:g} s (engine.start_timeout_s)")
            await self.stop()
            if isinstance(error, TimeoutError):
                raise late from None
            raise
        return info

    async def watch(self, lag: LagClock | None = None) -> NoReturn:
        """Wait until the server exits, stops answering or, with requests in flight, stalls. Raises EngineDied.

        lag: compares this engine with others that it watches too; one that lags behind them raises as well.
        """
        assert self._process is not None, "started"
        exit_code = asyncio.create_task(self._process.wait())
        progress = asyncio.create_task(watch_progress(self.client, self._recipe.engine, lag))
        try:
            await asyncio.wait({exit_code, progress}, return_when=asyncio.FIRST_COMPLETED)
            if exit_code.done():
                raise self._died(f"exited with code {exit_code.result()}")
            progress.result()
        except EngineDied as died:
            if exit_code.done():
                raise
            raise EngineDied(f"{died}{log_end(self.log_path)}") from None
        finally:
            exit_code.cancel()
            progress.cancel()
            await asyncio.gather(exit_code, progress, return_exceptions=True)

    def kill(self) -> None:
        """Send SIGKILL to the server's process group; does not wait. A no-op before the start."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Terminate the server with all its processes, after some seconds by SIGKILL. May be called twice."""
        self._socket.close()
        await self.client.close()
        if self._process is not None:
            await self._process.stop(_STOP_S)

    async def _launch(self) -> int:
        """Start the process; returns the read end of the pipe on which it reports that it is up."""
        read, write = os.pipe()
        listening = self._socket.fileno()
        env = engine_environment(
            self._recipe, secret=self._secret, ready_fd=write, listen_fd=listening, devices=self._devices
        )
        try:
            self._process = await ChildProcess.start(
                self.name, engine_command(self._arguments), env, self.log_path, pass_fds=(write, listening)
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
            self._socket.close()  # the server alone listens now: once it exits, connections are refused
        return read

    async def _ready(self, read: int) -> None:
        """Wait for the plugin's byte or the exit of the process."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        up: asyncio.Future[bytes] = loop.create_future()

        def readable() -> None:
            loop.remove_reader(read)
            up.set_result(os.read(read, 1))

        loop.add_reader(read, readable)
        exit_code = asyncio.create_task(self._process.wait())
        try:
            either: set[asyncio.Future[Any]] = {up, exit_code}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not up.done() or not up.result():  # the write end was closed: the process is about to exit
                raise self._died(f"exited with code {await exit_code} before it was up")
        finally:
            loop.remove_reader(read)
            os.close(read)
            exit_code.cancel()
            await asyncio.gather(exit_code, return_exceptions=True)

    async def _first_answer(self) -> None:
        """Wait for the first response: the plugin reports shortly before the server accepts connections."""
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(60),
            wait=tenacity.wait_exponential(0.02, max=1),
            retry=tenacity.retry_if_exception_type(EngineError),
            reraise=True,
        ):
            with attempt:
                await self.client.get("/health")

    def _died(self, what: str) -> EngineDied:
        return EngineDied(f"{self.name} (port {self.port}) {what}{log_end(self.log_path)}")


def bind_server(host: str, port: int) -> socket.socket:
    """A socket that listens on this address, on a free port for 0. Raises ValueError for a port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as err:
        if err.errno != errno.EADDRINUSE:
            raise ValueError(f"engine.host: expected an address of this machine, found {host} ({err})") from None
        raise ValueError(f"engine.port: expected a free port, found {host}:{port} in use") from None

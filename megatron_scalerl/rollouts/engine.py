"""One engine: vLLM's HTTP server as a process of ours, started, watched and stopped whole.

The server tells that it is up through a pipe (`rollouts.vllm_plugin`), its end is awaited, and its output goes
to a log file whose last lines are shown when it dies. It leads a process group of its own, so that stopping
it takes its core and its workers along.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any

import tenacity

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.engine_client import (
    SECRET_HEADER,
    EngineClient,
    EngineError,
    EngineInfo,
    SamplingSpec,
    check_engine,
    logprobs_mode,
)
from megatron_scalerl.rollouts.engine_options import engine_arguments, engine_command, engine_environment

__all__ = [
    "SECRET_HEADER",
    "EngineClient",
    "EngineDied",
    "EngineError",
    "EngineInfo",
    "EngineProcess",
    "SamplingSpec",
    "check_engine",
    "logprobs_mode",
]

_STOP_S = 20.0
_LOG_LINES = 15


class EngineDied(RuntimeError):
    """The server ended or fell silent; the message ends with its last log lines."""


class EngineProcess:
    """One vLLM server. `start`, then `client`; `watch` returns never or raises; `stop` whenever."""

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

        Raises ValueError for an option that vLLM does not know and for a port in use.
        """
        engine = recipe.engine
        self._recipe, self._secret = recipe, secret
        self._devices = devices
        self.name = f"engine-{index}"
        self.log_path = Path(log_path)
        self.port = claim_port(engine.host, engine.port + index if engine.port else 0)
        self._arguments = engine_arguments(recipe, host=engine.host, port=self.port, transport=transport)
        self.client = EngineClient(url=f"http://{engine.host}:{self.port}", secret=secret, name=self.name)
        self._process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """The server's process, which leads its group."""
        assert self._process is not None, "started"
        return self._process.pid

    async def start(self, *, version: int = 0) -> EngineInfo:
        """Start the server, wait until it answers, label its weights with `version`, and check it.

        Raises EngineDied if it ends or takes longer than engine.start_timeout_s, ValueError if it does not
        compute what the recipe asks for. It is stopped then.
        """
        assert self._process is None, "an engine starts once"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read, write = os.pipe()
        env = engine_environment(self._recipe, secret=self._secret, ready_fd=write, devices=self._devices)
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *engine_command(self._arguments),
                    env=env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(write,),
                )
        finally:
            os.close(write)
        self._exit = asyncio.create_task(self._process.wait())
        try:
            await self._ready(read)
            await self._first_answer()
            await self.client.set_version(version)
            info = await self.client.info()
            check_engine(info, self._recipe)
        except BaseException:
            await self.stop()
            raise
        return info

    async def watch(self) -> None:
        """Runs as long as the server lives and answers. Raises EngineDied."""
        assert self._exit is not None, "started"
        limit = self._recipe.engine.stall_timeout_s
        while True:
            done, _ = await asyncio.wait({self._exit}, timeout=limit / 4)
            if done:
                raise EngineDied(self._epitaph(f"ended with {self._exit.result()}"))
            try:
                async with asyncio.timeout(limit):
                    alive = await self.client.health()
            except TimeoutError:
                what = f"gave no answer within {limit:g} s (engine.stall_timeout_s)"
                raise EngineDied(self._epitaph(what)) from None
            if not alive and not self._exit.done():
                raise EngineDied(self._epitaph("fails its health check"))

    async def stop(self) -> None:
        """End the server with all its processes; first kindly, after some seconds not."""
        await self.client.close()
        if self._process is None or self._exit is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            done, _ = await asyncio.wait({self._exit}, timeout=_STOP_S)
            if done and how is signal.SIGTERM:
                continue  # the leader is gone; the second signal takes what it left behind
        await self._exit

    async def _ready(self, read: int) -> None:
        """Wait for the plugin's byte, the end of the process, or too long."""
        assert self._exit is not None
        loop = asyncio.get_running_loop()
        up: asyncio.Future[bytes] = loop.create_future()

        def readable() -> None:
            loop.remove_reader(read)
            up.set_result(os.read(read, 1))

        loop.add_reader(read, readable)
        limit = self._recipe.engine.start_timeout_s
        try:
            either: set[asyncio.Future[Any]] = {up, self._exit}
            await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(read)
            os.close(read)
        if up.done() and not up.result():  # the pipe's other end went away: it is about to end
            await asyncio.wait({self._exit}, timeout=_STOP_S)
        if self._exit.done():
            raise EngineDied(self._epitaph(f"ended with {self._exit.result()} before it was up"))
        if not up.done() or not up.result():
            raise EngineDied(self._epitaph(f"was not up within {limit:g} s (engine.start_timeout_s)"))

    async def _first_answer(self) -> None:
        """The plugin reports an instant before the server listens."""
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(60),
            wait=tenacity.wait_exponential(0.02, max=1),
            retry=tenacity.retry_if_exception_type(EngineError),
            reraise=True,
        ):
            with attempt:
                await self.client.get("/health")

    def _epitaph(self, what: str) -> str:
        return f"{self.name} (port {self.port}) {what}; the end of {self.log_path}:\n{last_lines(self.log_path)}"


def claim_port(host: str, port: int) -> int:
    """The port if it is free on this machine, any free one for 0. Raises ValueError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise ValueError(f"engine.host: expected an address of this machine, found {host} ({err})") from None
            raise ValueError(f"engine.port: expected a free port, found {host}:{port} in use") from None
        return probe.getsockname()[1]


def last_lines(path: Path, count: int = _LOG_LINES) -> str:
    """The end of a log file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])

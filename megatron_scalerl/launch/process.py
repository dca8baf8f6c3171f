"""Starts, watches and stops one engine: its server, wherever it runs, and the client to it. Runs in the controller.

The server is a child process (`launch.local_server`), or on another host, behind an agent (`launch.agents`).
Its end is awaited, its progress watched (`engine.watchdog`), and the last lines of its log are part of the error when
it dies. An engine that ended is not started again: another `EngineProcess` is (`launch.engines`).
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, NoReturn

from megatron_scalerl.engine.answers import EngineError, EngineInfo
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.numerics import check_engine
from megatron_scalerl.engine.watchdog import EngineDied, LagClock, watch_progress
from megatron_scalerl.launch.agents import RemoteServer
from megatron_scalerl.launch.local_server import STOP_S, LocalServer, ServerEnded, ServerPlace, engine_port
from megatron_scalerl.processes.child_process import log_end, race, time_limit
from megatron_scalerl.recipe import Recipe


class EngineProcess:
    """An engine. `start` it, then use `client`; `watch` never returns; `stop` may be called at any time."""

    def __init__(self, recipe: Recipe, server: LocalServer | RemoteServer, *, secret: str):
        self._recipe = recipe
        self.server = server
        self.name = server.name
        self.client = EngineClient(
            url="",
            secret=secret,
            name=self.name,
            settings=recipe.engine,
            tls=server.tls,
            adapter=recipe.adapters_alone,
        )

    @classmethod
    def local(
        cls, recipe: Recipe, *, index: int = 0, name: str = "", secret: str, log_path: str | Path, **place: Any
    ) -> EngineProcess:
        """An engine whose server is a child of this process, as the recipe has it.

        index: number of the engine from 0. name: empty for engine-`index`. place: fields of `ServerPlace` but its
        address. Raises ValueError for an option that vLLM does not know and for a port in use.
        """
        engine = recipe.engine
        address = ServerPlace(host=engine.host, port=engine_port(engine, index), **place)
        server = LocalServer(recipe, address, name=name or f"engine-{index}", secret=secret, log_path=log_path)
        return cls(recipe, server, secret=secret)

    async def start(self, *, version: int = 0) -> EngineInfo:
        """Start the server, wait until it answers, label its weights with `version`, and check it.

        Raises EngineDied if it exits or takes longer than engine.start_timeout_s, EngineError and ValueError if it
        does not compute what the recipe says (see `check_engine`). It is stopped first.
        """
        limit = self._recipe.engine.start_timeout_s
        try:
            async with time_limit(limit):
                self.client.url = await self.server.start()
                await self._first_answer()
                await self.client.set_version(version)
                info = await self.client.info()
            check_engine(info, self._recipe)
        except BaseException as error:
            timeout = self._died(f"was not up within {limit:g} s (engine.start_timeout_s)")  # has the log's end
            await self.stop()
            if isinstance(error, TimeoutError):
                raise timeout from None
            if isinstance(error, ServerEnded):
                raise self._died(str(error)) from None
            raise
        return info

    async def watch(self, lag: LagClock | None = None) -> NoReturn:
        """Wait until the server exits, stops answering or, with requests in flight, stalls. Raises EngineDied.

        lag: compares this engine with others that it watches too; one that lags behind them raises as well.
        """
        progress = watch_progress(self.client, self._recipe.engine, lag)
        async with race(self.server.wait(), progress) as (ended, hung):
            if ended.done():
                raise self._died(ended.result())
            try:
                hung.result()
            except EngineDied as died:
                raise EngineDied(f"{died}{log_end(self.server.log_path)}") from None
        raise AssertionError("watch_progress raises")

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Terminate the server with all its processes, after `grace_s` by SIGKILL. May be called twice."""
        try:
            await self.client.close()
        finally:
            await self.server.stop(grace_s)

    async def _first_answer(self) -> None:
        """Wait for the first response: the plugin reports shortly before the server accepts connections."""
        for pause_s in (*(0.02 * 2**n for n in range(6)), *(60 * [1.0])):
            with contextlib.suppress(EngineError):
                await self.client.get("/health")
                return
            await asyncio.sleep(pause_s)
        await self.client.get("/health")

    def _died(self, what: str) -> EngineDied:
        return EngineDied(f"{self.name} ({self.server.where}) {what}{log_end(self.server.log_path)}")

"""Starts, watches and stops an engine: the server, on whichever host, and the client. Runs in the controller.

The server is a child process (`launch.local_server`), or runs on another host behind an agent (`launch.agents`).
`EngineProcess.watch` waits for the server's end and watches the engine's progress (`engine.watchdog`). The error
about a dead engine has the last lines of the log. An `EngineProcess` starts once; for a restart, `launch.engines`
makes a new `EngineProcess`.
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
    """An engine's server and client.

    The caller calls `start`, then uses `client`. `watch` only raises and never returns. `stop` may be called anytime.
    """

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
        """An engine of the recipe whose server is a child of this process.

        index: number of the engine, from 0. name: name of the engine; empty for engine-`index`. place: fields of
        `ServerPlace` except host and port. Raises ValueError for an option unknown to vLLM and for a port in use.
        """
        engine = recipe.engine
        address = ServerPlace(host=engine.host, port=engine_port(engine, index), **place)
        server = LocalServer(recipe, address, name=name or f"engine-{index}", secret=secret, log_path=log_path)
        return cls(recipe, server, secret=secret)

    async def start(self, *, version: int = 0) -> EngineInfo:
        """Start the server, wait for the first answer, label the weights with `version`, and check the engine.

        Raises EngineDied for a server that exits or takes longer than engine.start_timeout_s. Raises EngineError and
        ValueError for an engine that does not follow the recipe (see `check_engine`). The server is stopped before an
        error is raised.
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
            # The error is made before `stop`, so that the quoted log lines are of the moment of the timeout.
            timeout = self._died(f"was not up within {limit:g} s (engine.start_timeout_s)")
            await self.stop()
            if isinstance(error, TimeoutError):
                raise timeout from None
            if isinstance(error, ServerEnded):
                raise self._died(str(error)) from None
            raise
        return info

    async def watch(self, lag: LagClock | None = None) -> NoReturn:
        """Wait until the server exits, stops answering or stalls with requests in flight, then raise EngineDied.

        lag: compares the rates of all watched engines. With `lag`, an engine that lags behind also raises EngineDied.
        """
        progress = watch_progress(self.client, self._recipe.engine, lag)
        async with race(self.server.wait(), progress) as (server_end, hang):
            if server_end.done():
                raise self._died(server_end.result())
            try:
                hang.result()
            except EngineDied as died:
                raise EngineDied(f"{died}{log_end(self.server.log_path)}") from None
        raise AssertionError("watch_progress raises")

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End all processes of the server by SIGTERM, and by SIGKILL after `grace_s` seconds. May be called twice."""
        try:
            await self.client.close()
        finally:
            await self.server.stop(grace_s)

    async def _first_answer(self) -> None:
        """Wait until the server answers: the plugin reports a server shortly before connections are accepted."""
        for pause_s in (*(0.02 * 2**n for n in range(6)), *(60 * [1.0])):
            with contextlib.suppress(EngineError):
                await self.client.get("/health")
                return
            await asyncio.sleep(pause_s)
        await self.client.get("/health")

    def _died(self, event: str) -> EngineDied:
        return EngineDied(f"{self.name} ({self.server.location}) {event}{log_end(self.server.log_path)}")

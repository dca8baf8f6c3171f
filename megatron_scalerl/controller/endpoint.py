"""The controller's HTTP endpoint for Prometheus: /metrics, and /metrics/engines/NAME for each engine's own.

An engine's vLLM server requires the run's secret, which rules the whole engine, and listens at another port after
every start. So Prometheus gets neither: this endpoint fetches an engine's page with the secret, over TLS where the
engine is on another host, and passes it on to who has the token, which only reads.

It runs in the controller's event loop: a scrape is answered between two of its tasks and shows one consistent state.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder

from megatron_scalerl.controller.collector import RunCollector
from megatron_scalerl.controller.scrape_files import ENGINE_PATH, METRICS_PATH, ScrapeFiles, list_nothing, token_of
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.transport import resolve_transport

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 8.0
"""Seconds for an engine's answer: below Prometheus' own limit of 10 s, so that it learns which engine is silent."""

MOST_CONNECTIONS = 64
"""At a time; further ones are closed at once, so that no user of this host takes the files that the run needs."""
CONNECTION_S = 60.0
"""Seconds after which a connection takes no further request. It is closed when an engine's answer must be there."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Answers GET requests for metrics, and nothing else."""

    def __init__(self, collector: RunCollector, files: ScrapeFiles, token: str | None) -> None:
        """token: what a request has to bring; None: nothing."""
        self._collector, self._files = collector, files
        self._expected = None if token is None else f"Bearer {token}".encode()
        self.app = web.Application(middlewares=[self._authorized])
        self.app.router.add_get(METRICS_PATH, self._metrics)
        self.app.router.add_get(ENGINE_PATH + "{name}", self._engine)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._expected is not None:
            given = request.headers.getall("Authorization", [])
            if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), self._expected):
                return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        try:
            await asyncio.to_thread(self._files.list_engines, [member.name for member in self._collector.members()])
        except OSError as error:  # a full disk may recover; the metrics say more than the file
            logger.warning("the targets of Prometheus are not written: %s", error)
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._collector.registry), headers={"Content-Type": kind})

    async def _engine(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        member = next((m for m in self._collector.members() if m.name == name), None)
        if member is None or member.client is None:
            return web.Response(status=404 if member is None else 503, text=f"{name!a}: no server is there\n")
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                page = await member.client.get(METRICS_PATH)
        except TimeoutError:
            return web.Response(status=504, text=f"{name}: no answer within {ENGINE_TIMEOUT_S:g} s\n")
        except EngineError as error:
            return web.Response(status=502, text=f"{error}\n")
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


@contextlib.asynccontextmanager
async def serving_metrics(recipe: Recipe, run_dir: Path, *, run_id: str) -> AsyncIterator[RunCollector | None]:
    """The endpoint of a recipe inside the block, and what it shows; None without telemetry.metrics_port.

    Raises ValueError for an address that cannot be bound, and for a token file that others own or may read. Where an
    earlier start of the run had an endpoint, an address in use is a warning, and None: nobody may be there to choose
    another port.
    """
    section = recipe.telemetry
    again = list_nothing(run_dir)
    if section.metrics_port is None:
        yield None
        return
    token = token_of(run_dir) if section.metrics_access == "token" else None
    try:
        bound = _bind(section.metrics_host, section.metrics_port)
    except ValueError as error:
        if not again:
            raise
        logger.warning("the run goes on without its endpoint for metrics: %s", error)
        yield None
        return
    device = "gpu" if resolve_transport(recipe.weights.transport) == "nccl" else "process"
    collector = RunCollector(run=recipe.name, run_id=run_id, planned_steps=recipe.steps, device=device)
    try:
        files = ScrapeFiles(run_dir, name=recipe.name, address=_address(bound), authorized=token is not None)
        runner = web.AppRunner(Endpoint(collector, files, token).app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            listening = await asyncio.get_running_loop().create_server(_limited(runner), sock=bound)
            logger.info("metrics at http://%s%s", _address(bound), METRICS_PATH)
            try:
                yield collector
            finally:
                listening.close()
        finally:
            with contextlib.suppress(OSError):
                list_nothing(run_dir)  # the port may become another program's, and requests bring the token
            await runner.cleanup()
    finally:
        bound.close()


def _limited(runner: web.AppRunner) -> Callable[[], asyncio.BaseProtocol]:
    """A factory of the runner's connections that limits their number and their age."""

    def connection() -> asyncio.BaseProtocol:
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None
        made = server()
        at_once = len(server.connections) >= MOST_CONNECTIONS
        loop.call_later(0.0 if at_once else CONNECTION_S, made.force_close if at_once else made.close)
        loop.call_later(CONNECTION_S + ENGINE_TIMEOUT_S + 1.0, made.force_close)
        return made

    return connection


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError naming the keys of the recipe."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family)  # type: ignore[arg-type]
    except OSError as error:
        raise ValueError(
            f"telemetry.metrics_host, telemetry.metrics_port: expected an address to listen at, found {host} and "
            f"{port}: {error.strerror or error}"
        ) from None


def _address(bound: socket.socket) -> str:
    """host:port of a socket as others reach it; of one at all addresses, by this host's name."""
    host, port = bound.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

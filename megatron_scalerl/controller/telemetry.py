"""Metrics of a run for Prometheus: the collector, the HTTP endpoint, and the endpoint's files.

    GET /metrics                  the metrics at the moment of the request
    RUN/metrics/token             the bearer token, mode 0600; kept from one start of the run to the next
    RUN/metrics/targets.json      the endpoint, in the format of Prometheus' file_sd

RUN/metrics has mode 0700: only the owner can read the files.

Counters of device-seconds come from the ledger, which a restart continues, and so never fall. All other counters
begin at 0 when the controller's process starts; Prometheus' `rate` and `increase` allow for such a reset. Numbers of
the last step and the last validation are absent until this process has made a step or a validation.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.engine.membership import EngineState, Member
from megatron_scalerl.launch.hosts import takes_gpus
from megatron_scalerl.processes.secret_file import read_secret, write_secret
from megatron_scalerl.recipe import Recipe

logger = logging.getLogger(__name__)

PREFIX = "scalerl"
SUMMED = ("tokens", "weight_bytes")
"""Keys of a step's record whose values are added up for `sum_total`, as are all keys that end in `_seconds`."""
METRICS_PATH = "/metrics"
MOST_CONNECTIONS = 64
"""Largest number of open connections to the endpoint. Further connections are closed at once, so that no user of the
host can exhaust the run's file descriptors."""
CONNECTION_S = 60.0
"""Age at which a connection to the endpoint is closed (s)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RunCollector(Collector):
    """The metric families of a run; also a sink of step records and validations (`controller.metrics`).

    All methods run in the controller's event loop.
    """

    def __init__(self, *, run: str, run_id: str, planned_steps: int, device: str):
        """run: the recipe's name. device: the kind of a device, gpu or process."""
        self.members: Callable[[], Sequence[Member]] = lambda: ()
        """Returns the run's engines: none until the launch, when `train` sets a function of the launched engines."""
        self._info = {"run": run, "run_id": run_id, "device": device}
        self._planned_steps = planned_steps
        self._device_seconds: Callable[[], Mapping[str, float]] = dict
        self._attempts = 0
        self._step = 0
        self._last: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._validated_step: int | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attempt(self, step: int, device_seconds: Callable[[], Mapping[str, float]]) -> None:
        """Start an attempt at `step`. device_seconds: returns role -> device-seconds that the run has held so far."""
        self._attempts += 1
        self._step = step
        self._device_seconds = device_seconds

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Store the finite numbers of a batch's or validation's record for the next scrape."""
        self._last.update(scalars)
        if "validation/pass_rate" in scalars:
            self._validated_step = step
            return
        # A batch's record lacks reasons for which no completion was lost. The last numbers of these reasons become 0.
        self._last |= {key: 0.0 for key in self._last if "lost/" in key and key not in scalars}
        self._step = step
        for key, value in scalars.items():
            if key.endswith("_seconds") or key in SUMMED:
                self._sums[key] += max(0.0, value)
        seconds = scalars.get("step_seconds", 0.0)
        self._counts["generated_tokens"] += scalars.get("generated_tokens_per_second", 0.0) * seconds
        if "skipped" in scalars:
            self._counts["skipped_batches"] += 1
        else:
            self._counts["batches"] += 1
        if "weight_bytes" in scalars:
            self._counts["weight_updates"] += 1

    def close(self) -> None:
        """Do nothing at the end of an attempt: the last numbers remain for scrapes."""

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family, for one scrape."""
        info = GaugeMetricFamily(
            f"{PREFIX}_run_info", "Always 1. The labels name the run and the kind of device.", labels=list(self._info)
        )
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield _family("step", "Optimizer steps made so far.", self._step)
        yield _family("planned_steps", "Optimizer steps that the recipe plans.", self._planned_steps)
        text = "Numbers of the last line of metrics.jsonl, by key. validation/KEY is a number of the last validation."
        yield _family("last", text, self._last, label="key")
        text = "Sums over the lines of metrics.jsonl since the controller started, by key: seconds, tokens, bytes."
        yield _family("sum_total", text, self._sums, label="key")
        if self._validated_step is not None:
            yield _family("validation_step", "Optimizer step of the last validation.", self._validated_step)
        for name, text in (
            ("generated_tokens", "Tokens of finished completions, validation included."),
            ("batches", "Batches with an optimizer step."),
            ("skipped_batches", "Batches without an optimizer step, since the filters left no sample."),
            ("weight_updates", "Weight updates of the engines after optimizer steps."),
        ):
            yield _family(f"{name}_total", text, self._counts[name])
        text = "Device-seconds that the run has held in all attempts, by role of the ledger."
        yield _family("device_seconds_total", text, self._device_seconds(), label="role")
        yield from self._engine_families()
        text = "Restarts of the trainer's ranks."
        yield _family("trainer_restarts_total", text, max(0, self._attempts - 1))

    def _engine_families(self) -> Iterable[Metric]:
        members = self.members()
        states = [member.state for member in members]
        yield _family("engines", "Engines by state.", {s.value: states.count(s) for s in EngineState}, label="state")
        given_up_engines = sum(member.given_up for member in members)
        yield _family("engines_given_up", "Engines that are given up and not started again.", given_up_engines)
        versions = [member.version for member in members if member.version is not None]
        if versions:
            yield _family("policy_version", "Newest policy version that an engine holds.", max(versions))
        values = {member.name: member.restarts for member in members}
        yield _family("engine_restarts_total", "Restarts of an engine.", values, label="engine")
        values = {member.name: member.lost_tokens for member in members}
        text = "Tokens that evicted servers generated and no client received."
        yield _family("engine_lost_tokens_total", text, values, label="engine")
        values = {member.name: member.client.in_flight if member.client else 0 for member in members}
        yield _family("engine_requests", "Generation requests in flight at an engine.", values, label="engine")


def _family(name: str, text: str, values: Mapping[str, float] | float, *, label: str = "") -> Metric:
    """A metric family: a counter if the name ends in `_total`, else a gauge. values: a number, or label -> number."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"{PREFIX}_{name}", text, labels=[label] if label else [])
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric([key], value)
    else:
        family.add_metric([], values)
    return family


class Endpoint:
    """The HTTP application that answers GET /metrics. Also writes the endpoint's file targets.json."""

    def __init__(self, collector: RunCollector, run_dir: Path, *, name: str, address: str, token: str | None):
        """name: the run's name. address: host:port at which Prometheus finds the endpoint. token: the bearer token
        that requests need; None if requests need no token."""
        folder = (run_dir / "metrics").absolute()
        folder.mkdir(mode=0o700, exist_ok=True)
        # The folder may exist already, with another mode.
        folder.chmod(0o700)
        self._registry = collector.registry
        self._authorization: bytes | None = None
        if token is not None:
            self._authorization = f"Bearer {token}".encode()
        target = {"targets": [address], "labels": {"run": name}}
        write_durably(folder / "targets.json", json.dumps([target]).encode())
        self.app = web.Application(middlewares=[self._authorized])
        self.app.router.add_get(METRICS_PATH, self._metrics)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._authorization is not None:
            # Two Authorization headers are refused, since HTTP servers differ in which of two headers counts.
            headers = request.headers.getall("Authorization", [])
            if len(headers) != 1 or not hmac.compare_digest(headers[0].encode(errors="replace"), self._authorization):
                return web.Response(status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})


@contextlib.asynccontextmanager
async def serving_metrics(recipe: Recipe, run_dir: Path, *, run_id: str) -> AsyncIterator[RunCollector | None]:
    """Serve the endpoint of a recipe during the block. The value is the collector; None without an endpoint.

    Without telemetry.metrics_port there is no endpoint. Raises ValueError if the address cannot be bound at the run's
    first start (a restart goes on without an endpoint), and if another user owns or may read the token file.
    """
    section = recipe.telemetry
    restarted = _list_nothing(run_dir)
    if section.metrics_port is None:
        yield None
        return
    token = None
    if section.metrics_access == "token":
        token = _token(run_dir)
    try:
        listener = _bind(section.metrics_host, section.metrics_port)
    except ValueError as error:
        if not restarted:
            raise
        # A restart may be unattended, so the run goes on without metrics instead of failing.
        logger.warning("the run goes on without its endpoint for metrics: %s", error)
        yield None
        return
    device = "gpu" if takes_gpus(recipe.weights.transport) else "process"
    collector = RunCollector(run=recipe.name, run_id=run_id, planned_steps=recipe.steps, device=device)
    with contextlib.closing(listener):
        endpoint = Endpoint(collector, run_dir, name=recipe.name, address=_address(listener), token=token)
        runner = web.AppRunner(endpoint.app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            server = await asyncio.get_running_loop().create_server(_limited(runner), sock=listener)
            logger.info("metrics at http://%s%s", _address(listener), METRICS_PATH)
            with contextlib.closing(server):
                yield collector
        finally:
            with contextlib.suppress(OSError):
                # If the target stayed listed, Prometheus would send the token to any program that takes the port
                # later.
                _list_nothing(run_dir)
            await runner.cleanup()


def _token(run_dir: Path) -> str:
    """The run's bearer token, created if missing. Raises ValueError if another user owns or may read the file."""
    path = run_dir / "metrics" / "token"
    if path.is_file() and not path.is_symlink() and path.stat().st_size == 0:
        # A start that was killed during the write left an empty file.
        path.unlink()
    try:
        return read_secret(path).strip()
    except FileNotFoundError:
        token = secrets.token_hex(32)
        write_secret(path, token)
        return token


def _list_nothing(run_dir: Path) -> bool:
    """Empty targets.json, so that Prometheus sends no token to a program that may now listen at the old address.

    Returns True if there was a targets.json, which only an earlier start with an endpoint writes. Raises OSError.
    """
    path = run_dir / "metrics" / "targets.json"
    if path.exists():
        write_durably(path, b"[]")
        return True
    return False


def _limited(runner: web.AppRunner) -> Callable[[], asyncio.BaseProtocol]:
    """A protocol factory that limits the number and the age of the runner's connections."""

    def connection() -> asyncio.BaseProtocol:
        server = runner.server
        loop = asyncio.get_running_loop()
        assert server is not None
        protocol = server()
        if len(server.connections) >= MOST_CONNECTIONS:
            # The connection has no transport yet, so the event loop closes the connection in its next round.
            loop.call_later(0.0, protocol.force_close)
        else:
            # `close` waits for an answer in progress, `force_close` a second later does not.
            loop.call_later(CONNECTION_S, protocol.close)
            loop.call_later(CONNECTION_S + 1.0, protocol.force_close)
        return protocol

    return connection


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError, which names the recipe's keys, if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)  # type: ignore[arg-type]
    except OSError as error:
        raise ValueError(
            f"telemetry.metrics_host, telemetry.metrics_port: nothing can listen at {host}, port {port}: "
            f"{error.strerror or error}"
        ) from None


def _address(listener: socket.socket) -> str:
    """host:port at which Prometheus reaches a socket. The host's name stands for a socket that listens everywhere."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"

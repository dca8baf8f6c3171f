"""Coordinates a weight update: pause every engine, send, verify, label, resume.

    trainer  ── broadcast ──────────────► engines (vLLM's weight-transfer protocol)
       ▲ connect_weights, send_weights        ▲ /pause /start_weight_update /update_weights ... /resume
       └────────────── WeightSync (controller) ┘

Consumes: one version of the trainer's weights per update.
Waits for: in each phase, the answers of all engines and, while sending, of the trainer.
Unblocked by: these answers, or weights.timeout_s. Engines pause between two tokens and keep their requests, so no
phase waits for a completion.

Every failure raises WeightUpdateError with engine and phase. The engines stay paused then and serve no new version:
`connect` and `publish` again, or stop the run.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.manifest import to_json
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.trainer.client import TrainerClient
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.transport import resolve_transport

EngineCall = Callable[[EngineClient], Awaitable[Any]]


class WeightUpdateError(RuntimeError):
    """No engine counts as updated. The message names the engine (or the trainer) and the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One finished weight update."""

    version: int
    """Policy version that every engine serves after the update."""
    seconds_paused: float
    """Seconds from the pause of the last engine to the resumption of the first."""
    seconds_total: float
    bytes: int
    """Bytes of one copy of the parameters, padding included."""
    digest: str
    """Digest of these bytes, equal for trainer and engines."""


class WeightSync:
    """Weight updates of one trainer and its engines; one update at a time."""

    def __init__(self, trainer: TrainerClient, engines: Sequence[EngineClient], recipe: Recipe) -> None:
        assert engines, "at least one engine"
        self._trainer, self._engines, self._recipe = trainer, list(engines), recipe
        self._lock = asyncio.Lock()

    async def connect(self) -> None:
        """Join trainer and engines in one process group, leaving an earlier one. Raises WeightUpdateError."""
        section = self._recipe.weights
        manifest = await self._call("manifest", "trainer", self._trainer.manifest())
        worlds = [info.world_size for info in await self._all("connect", lambda engine: engine.info())]
        connection = Connection(
            backend=resolve_transport(section.transport),
            rendezvous=self._trainer.rendezvous,
            group=f"weights-{uuid.uuid4().hex}",
            world_size=1 + sum(worlds),
            bucket_mib=section.bucket_mib,
            timeout_s=section.timeout_s,
        )
        body = {"connection": msgspec.to_builtins(connection), "manifest": to_json(manifest)}
        offsets = {e.name: 1 + sum(worlds[:i]) for i, e in enumerate(self._engines)}

        async def join(engine: EngineClient) -> None:
            info = {**body, "rank_offset": offsets[engine.name]}
            await engine.post("/init_weight_transfer_engine", {"init_info": info})

        await self._all("connect", join, trainer=self._trainer.connect_weights(connection))

    async def publish(self, version: int) -> WeightUpdate:
        """Send the trainer's weights to every engine, labeled with this version. Raises WeightUpdateError."""
        async with self._lock:
            return await self._publish(version)

    async def _publish(self, version: int) -> WeightUpdate:
        begin = time.perf_counter()
        clear = self._recipe.rollouts.kv_cache == "recompute"
        await self._all("pause", lambda engine: engine.pause(clear_cache=clear))
        paused = time.perf_counter()
        await self._all("start", lambda engine: engine.post("/start_weight_update", None))
        body = {"update_info": {"version": version}}
        report, *_ = await self._all(
            "update", lambda engine: engine.post("/update_weights", body), trainer=self._trainer.send_weights(version)
        )
        label = {"weight_version": str(version)}
        await self._all("finish", lambda engine: engine.post("/finish_weight_update", label))
        for engine, info in zip(self._engines, await self._all("verify", lambda engine: engine.info())):
            expected, found = (str(version), report.digest), (info.weight_version, info.weight_digest)
            if expected != found:
                raise WeightUpdateError(f"{engine.name}: verify: expected version, digest {expected}, found {found}")
        resumed = time.perf_counter()
        await self._all("resume", lambda engine: engine.resume())
        return WeightUpdate(
            version=version,
            seconds_paused=resumed - paused,
            seconds_total=time.perf_counter() - begin,
            bytes=report.bytes,
            digest=report.digest,
        )

    async def _all(self, phase: str, call: EngineCall, trainer: Awaitable[Any] | None = None) -> list[Any]:
        """Concurrent calls to every engine; with `trainer`, its answer comes first.

        Failures are raised once all have answered: a bug as it is, others together as one WeightUpdateError.
        """
        calls = [] if trainer is None else [self._call(phase, "trainer", trainer)]
        calls += [self._call(phase, e.name, call(e)) for e in self._engines]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [r for r in results if isinstance(r, BaseException)]
        for failure in failures:
            if not isinstance(failure, WeightUpdateError):
                raise failure
        if failures:
            raise WeightUpdateError("; ".join(map(str, failures))) from failures[0]
        return results

    async def _call(self, phase: str, name: str, call: Awaitable[Any]) -> Any:
        limit = self._recipe.weights.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as err:
            raise WeightUpdateError(f"{name}: {phase}: no answer within {limit:g} s (weights.timeout_s)") from err
        except (EngineError, RuntimeError, ValueError, OSError) as err:
            raise WeightUpdateError(f"{name}: {phase}: {err}") from err

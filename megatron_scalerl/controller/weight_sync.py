"""A weight update, conducted: pause every engine, send, check, label, resume.

    trainer  ── broadcast ──────────────► engines (vLLM's weight-transfer protocol)
       ▲ connect_weights, send_weights        ▲ /pause /start_weight_update /update_weights ... /resume
       └────────────── WeightSync (controller) ┘

Whatever goes wrong raises WeightUpdateError with the engine and the phase. The engines are then left as they
are, paused, and hold no new version; `connect` and `publish` again, or stop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from megatron_scalerl.checkpoints.manifest import Manifest, to_json
from megatron_scalerl.distributed.rendezvous import Rendezvous
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.weights.connection import Connection, SendReport
from megatron_scalerl.weights.transport import resolve_transport

Call = Callable[[EngineClient], Awaitable[Any]]


class WeightUpdateError(RuntimeError):
    """No engine may be taken as updated. The message names the engine (or the trainer) and the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One finished weight update."""

    version: int
    """Policy version that every engine now serves."""
    seconds_paused: float
    """From the last engine's pause to the first one's resumption."""
    seconds_total: float
    bytes: int
    """Parameters sent once, padding included."""
    digest: str
    """Digest of these bytes, equal on both sides."""


class TrainerClient(Protocol):
    """The part of the trainer that takes part in an update."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where the sending rank meets the engines."""

    async def manifest(self) -> Manifest:
        """What will be sent, in order."""

    async def connect_weights(self, connection: Connection) -> None:
        """`make_sender(connection)` on the sending rank; returns once the group stands."""

    async def send_weights(self, version: int) -> SendReport:
        """Broadcast the weights as this version."""


class WeightSync:
    """Conducts the updates of one trainer and its engines; one update at a time."""

    def __init__(self, trainer: TrainerClient, engines: Sequence[EngineClient], recipe: Recipe) -> None:
        assert engines, "at least one engine"
        self._trainer, self._engines, self._recipe = trainer, list(engines), recipe
        self._lock = asyncio.Lock()

    async def connect(self) -> None:
        """Bring trainer and engines into one group, leaving an earlier one. Raises WeightUpdateError."""
        section = self._recipe.weights
        manifest = await self._of_trainer("manifest", self._trainer.manifest())
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

        await self._together("connect", self._trainer.connect_weights(connection), join)

    async def publish(self, version: int) -> WeightUpdate:
        """Give the trainer's weights to every engine as this version. Raises WeightUpdateError."""
        async with self._lock:
            return await self._publish(version)

    async def _publish(self, version: int) -> WeightUpdate:
        begin = time.perf_counter()
        clear = self._recipe.rollouts.kv_cache == "recompute"
        await self._all("pause", lambda engine: engine.pause(clear_cache=clear))
        paused = time.perf_counter()
        await self._all("start", lambda engine: engine.post("/start_weight_update", None))
        body = {"update_info": {"version": version}}
        report = await self._together(
            "update", self._trainer.send_weights(version), lambda engine: engine.post("/update_weights", body)
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

    async def _all(self, phase: str, call: Call) -> list[Any]:
        """One call on every engine at the same time; failures are raised when all have answered."""
        tasks = [self._timed(phase, e.name, call(e)) for e in self._engines]
        return _values(await asyncio.gather(*tasks, return_exceptions=True))

    async def _together(self, phase: str, trainer: Awaitable[Any], call: Call) -> Any:
        """The trainer's part and every engine's at the same time; the trainer's answer."""
        tasks = [self._of_trainer(phase, trainer)] + [self._timed(phase, e.name, call(e)) for e in self._engines]
        return _values(await asyncio.gather(*tasks, return_exceptions=True))[0]

    async def _of_trainer(self, phase: str, call: Awaitable[Any]) -> Any:
        return await self._timed(phase, "trainer", call)

    async def _timed(self, phase: str, name: str, call: Awaitable[Any]) -> Any:
        limit = self._recipe.weights.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as err:
            raise WeightUpdateError(f"{name}: {phase}: no answer within {limit:g} s (weights.timeout_s)") from err
        except (EngineError, RuntimeError, ValueError, OSError) as err:
            raise WeightUpdateError(f"{name}: {phase}: {err}") from err


def _values(results: list[Any]) -> list[Any]:
    failures = [r for r in results if isinstance(r, BaseException)]
    for failure in failures:
        if not isinstance(failure, WeightUpdateError):
            raise failure
    if failures:
        raise WeightUpdateError("; ".join(map(str, failures))) from failures[0]
    return results

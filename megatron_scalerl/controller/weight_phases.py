"""The phases of a weight update: one call to every member at once, timed, bounded, and its failures gathered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.trainer.client import TrainerError
from megatron_scalerl.weights.plan import SendReport

EngineCall = Callable[[EngineClient], Awaitable[Any]]

COLLECTIVE = ("connect", "stage", "update")
"""Phases in which the failure of one member makes all others fail too."""
_POLL_S = 0.02
"""Between two questions whether a staged update has arrived."""


class Refused(EngineError):
    """The trainer's tensors are not those of this engine's model."""


class PhaseFailed(Exception):
    """Some members failed in a phase."""

    def __init__(
        self, phase: str, engines: dict[EngineClient, str], trainer: str | None, *, refused: bool = False
    ) -> None:
        """refused: by all members."""
        self.phase, self.engines, self.refused = phase, engines, refused
        lines = [*([f"trainer: {phase}: {trainer}"] if trainer else []), *engines.values()]
        super().__init__("; ".join(lines))


class Phases:
    """The phases of one attempt at an update."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: weights.timeout_s."""
        self._limit_s = limit_s
        self.seconds: dict[str, float] = {}
        """Phase -> seconds until all members had answered."""

    async def all(
        self, phase: str, engines: Sequence[EngineClient], call: EngineCall, trainer: Awaitable[Any] | None = None
    ) -> list[Any]:
        """Concurrent calls to the engines; with `trainer`, its answer comes first.

        Raises PhaseFailed once all have answered, and at once what ends the trainer or is a bug.
        """
        calls = [] if trainer is None else [self._limited(trainer)]
        calls += [self._limited(call(engine)) for engine in engines]
        begin = time.perf_counter()
        results = await asyncio.gather(*calls, return_exceptions=True)
        self.seconds[phase] = time.perf_counter() - begin
        for result in results:
            of_member = isinstance(result, RuntimeError | ValueError | OSError)
            if isinstance(result, TrainerError) or (isinstance(result, BaseException) and not of_member):
                raise result
        of_trainer = results[0] if trainer is not None and isinstance(results[0], Exception) else None
        of_engines = {
            engine: f"{engine.name}: {phase}: {_line(result)}"
            for engine, result in zip(engines, results[len(results) - len(engines) :])
            if isinstance(result, Exception)
        }
        if of_trainer or of_engines:
            refused = all(isinstance(result, Refused) for result in results)
            raise PhaseFailed(phase, of_engines, _line(of_trainer) if of_trainer else None, refused=refused)
        return results

    async def _limited(self, call: Awaitable[Any]) -> Any:
        limit = self._limit_s
        try:
            async with asyncio.timeout(limit):
                return await call
        except TimeoutError as err:
            raise RuntimeError(f"no answer within {limit:g} s (weights.timeout_s)") from err


async def stage(engine: EngineClient, version: int) -> None:
    """Let an engine receive an update while it generates; returns once all of its workers have all of it.

    vLLM asks the workers of its first data-parallel rank; those of the others wait for theirs in `update`.
    """
    await engine.rpc("msrl_stage_weights", str(version))
    while True:
        states = await engine.rpc("msrl_staged_weights")
        if wrong := next((str(state) for state in states if state), ""):
            raise EngineError(wrong)
        if states and None not in states:
            return
        await asyncio.sleep(_POLL_S)


async def verify(engine: EngineClient, version: int, report: SendReport, shards: Sequence[int]) -> None:
    """Compare what an engine got and holds with what was sent. shards: of its workers.

    Raises EngineError, with what was expected and found.
    """
    info = await engine.info()
    of_workers = shards[: len(info.weight_digests)]  # as in `_needs`
    digests = tuple(report.digests[shard] for shard in of_workers)
    expected, found = (str(version), digests), (info.weight_version, tuple(info.weight_digests))
    if expected != found:
        raise EngineError(f"expected version, digests {expected}, found {found}")
    held = await engine.rpc("msrl_live_digest")
    if not isinstance(held, list) or len(held) != len(info.weight_digests):
        raise EngineError(f"expected a digest of each worker, found {held!r}")
    for worker, (shard, live) in enumerate(zip(shards, held)):
        if live not in (report.values[shard], ""):
            raise EngineError(f"worker {worker}: expected values of digest {report.values[shard]}, holds {live}")


def _line(error: Exception) -> str:
    return str(error) or type(error).__name__

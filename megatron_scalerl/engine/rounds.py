"""Runs requests in rounds: a round's requests reach paused engines together, and run without further requests.

For runs with `rollouts.deterministic`. The last bits of a request's result depend on the requests that share a batch,
and the batches depend on the order and the time of arrival. In a round neither varies: the engines are paused, every
request has a different priority and goes to an engine that the request's rank alone decides, and the engines continue
once all requests have arrived. So vLLM forms the same batches in every run, with scheduling by priority, and without
prefix cache and asynchronous scheduling (`engine.options`).

    begin --> pause --> submit (caller) --> go: wait until the engines hold all requests --> resume

The caller makes sure that two rounds never overlap, and that nothing else uses the engines during a round.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.processes.child_process import time_limit

_POLL_S = 0.01
"""Time between two polls of the number of requests of an engine (s). vLLM has no call that waits for requests."""


class Round:
    """One round of requests, whose engines are paused until `go`."""

    def __init__(self, engines: Membership, members: Sequence[EngineClient], timeout_s: float):
        self._engines = engines
        self._members = list(members)
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        """Number of engines in the round."""
        return len(self._members)

    def engine(self, rank: int) -> EngineClient:
        """The engine to which the caller has to send the request with this rank (0, 1, ...) in the round."""
        return self._members[rank % len(self._members)]

    async def go(self, requests: Sequence[EngineClient]) -> None:
        """Wait until the engines have received all submitted requests, then resume the engines.

        requests: the engine of each submitted request. Evicts an engine that fails, or does not receive the requests
        within the time limit.
        """
        counts = Counter(requests)
        await asyncio.gather(*(self._go(engine, counts[engine]) for engine in self._members))

    async def _go(self, engine: EngineClient, count: int) -> None:
        received = 0
        try:
            async with time_limit(self._timeout_s):
                while (received := await _received(engine)) < count:
                    await asyncio.sleep(_POLL_S)
                await engine.resume()
        except TimeoutError:
            self._engines.evict(
                engine,
                f"{engine.name}: the engine has {received} of {count} requests and has not resumed within "
                f"{self._timeout_s:g} s of submission (weights.timeout_s)",
            )
        except EngineError as error:
            self._engines.evict(engine, str(error))


class Rounds:
    """Starts rounds on the engines of a run."""

    def __init__(self, engines: Membership, *, timeout_s: float):
        """timeout_s: time within which an engine has to pause, and to receive all requests, or is evicted (s)."""
        self._engines = engines
        self._timeout_s = timeout_s

    async def begin(self) -> Round:
        """Start a round: wait until all engines that are not given up serve, and pause all of the engines."""
        while True:
            await self._engines.until(self._complete)
            members = self._engines.serving
            await asyncio.gather(*(self._pause(engine) for engine in members))
            if members == self._engines.serving:
                return Round(self._engines, members, self._timeout_s)

    def _complete(self) -> bool:
        return bool(self._engines.serving) and len(self._engines.serving) == self._engines.left

    async def _pause(self, engine: EngineClient) -> None:
        try:
            async with time_limit(self._timeout_s):
                await engine.pause(clear_cache=False)
        except TimeoutError:
            self._engines.evict(
                engine, f"{engine.name}: the engine did not pause within {self._timeout_s:g} s (weights.timeout_s)"
            )
        except EngineError as error:
            self._engines.evict(engine, str(error))


async def _received(engine: EngineClient) -> int:
    """Number of requests that an engine has received and not finished."""
    return sum(core.waiting + core.decoding for core in (await engine.progress()).cores)

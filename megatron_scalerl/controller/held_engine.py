"""An engine that keeps a policy version for its validation and its evaluation while the trainer goes on.

    begin of a measurement   a serving engine is held: no new group, no weight update; completions in flight go on
    end of the last one      it is stale, and gets the weights in the next update, or while the trainer waits

Both measurements of one version share the engine. One that is evicted is not replaced: by then the trainer may have
left the version, so the measurement is lost (HeldEngineLost), and is made of a later version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from megatron_scalerl.controller.meter import Measurement, Meter
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership

logger = logging.getLogger(__name__)


class HeldEngineLost(RuntimeError):
    """The engine that kept the policy version of a measurement was evicted."""


@contextlib.contextmanager
def losses_as_one() -> Iterator[None]:
    """Around a task group: where all of its failures are HeldEngineLost, one of them is raised in its place."""
    try:
        yield
    except BaseExceptionGroup as failures:
        lost = failures.subgroup(HeldEngineLost)
        if lost is None or lost.exceptions != failures.exceptions:
            raise
        raise HeldEngineLost(str(lost.exceptions[0])) from None


class OneAtATime:
    """At most one task of a kind, beside the training."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        """The one in progress, or one that has ended since the last `collect`."""

    @property
    def in_progress(self) -> bool:
        """True between the begin of the task and its end."""
        return self._task is not None and not self._task.done()

    def collect(self) -> None:
        """Forget a task that has ended. Raises its failure."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def close(self) -> None:
        """Cancel the task in progress, if any."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class HeldEngine:
    """At most one engine for each version, as long as another one serves."""

    def __init__(self, engines: Membership, meter: Meter) -> None:
        self._engines, self._meter = engines, meter
        self._users: dict[int, list[EngineClient]] = {}
        """Version -> its engine, once for each measurement."""

    def hold(self, version: int, purpose: Measurement, *, alone: bool = False) -> EngineClient | None:
        """The engine that keeps `version`, which all serving engines have now; each call needs a `release`.

        The one with the fewest requests in flight; the others serve on. alone: no other needs to. None if fewer than
        two serve, or if the engine of this version was evicted.
        """
        users = self._users.get(version, [])
        if users:
            engine = users[0]
            if engine not in self._engines.held:
                return None
        else:
            serving = self._engines.serving
            if len(serving) < 2 - alone:
                return None
            engine = min(serving, key=lambda engine: engine.in_flight)
            self._meter.hold(engine, self._engines.devices_of(engine), purpose)
            self._engines.hold(engine)
            logger.info("%s is held at version %d", engine.name, version)
        self._users[version] = [*users, engine]
        return engine

    def check(self, engine: EngineClient) -> None:
        """Raises HeldEngineLost if `engine` is not held any more."""
        if engine not in self._engines.held:
            raise HeldEngineLost(f"{engine.name}, which kept the version, was evicted")

    def release(self, engine: EngineClient) -> None:
        """One measurement on this engine is over."""
        version = next(version for version, users in self._users.items() if engine in users)
        self._users[version].pop()
        if not self._users[version]:
            del self._users[version]
            self._meter.release(engine)
            self._engines.release(engine)

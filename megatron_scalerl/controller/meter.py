"""Measures the windows between two charges and splits each window between the ledger's roles.

A batch has two windows: `produce`, until it is composed, and `train`, its optimizer step and weight update. In each
window the devices of trainer and engines are charged for the whole time. If a validation ran in it, engine time is
split between `validation` and `engine` in proportion to the tokens generated for each; trainer time counts as
`validation` while the trainer waits for the validation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from megatron_scalerl.controller.ledger import Ledger, Phase, Role
from megatron_scalerl.controller.run_folder import ResumePoint
from megatron_scalerl.launch.fleet import Devices

HEARTBEAT_S = 10.0
"""Seconds between heartbeats: the longest time that a crash leaves uncharged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTime:
    """Both windows of one batch together."""

    seconds: float = 0.0
    """Wall time."""
    tokens: int = 0
    """Tokens of the completions that finished in it, validation included."""


class Meter:
    """Charges all devices of the run to the ledger, window by window, from its construction on, or `since`."""

    def __init__(
        self,
        ledger: Ledger,
        devices: Devices,
        start: ResumePoint,
        *,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: the checkpoint to resume from. since: by the clock, since when the devices are held: the end of
        the attempt before it in this process, for the first one the job's start. None: from now on. clock: monotonic
        seconds."""
        self.ledger = ledger
        self._clock = clock
        self._training_tokens = self._validation_tokens = 0
        self._batch = BatchTime()
        self.pinned_seconds = 0.0
        """Seconds of the current window in which the trainer waited for a validation."""
        self._trainer, self._engine = devices.trainer, devices.engine
        self._since = clock() if since is None else since
        self._engine_since, self._engine_seconds = self._since, 0.0  # of the current window
        self._batches, self._step = start.batches, start.step

    @property
    def elapsed(self) -> float:
        """Seconds since the last charge."""
        return self._clock() - self._since

    @property
    def _engine_devices(self) -> float:
        """Devices of the engines, on average over the window so far."""
        now = self._clock()
        if self._engine_since == self._since or now <= self._since:
            return self._engine
        return (self._engine_seconds + self._engine * (now - self._engine_since)) / (now - self._since)

    def hold_engine_devices(self, count: int) -> None:
        """From now on, the engines hold so many devices: one joined, or its host left the run for good."""
        now = self._clock()
        self._engine_seconds += self._engine * (now - self._engine_since)
        self._engine, self._engine_since = count, now

    def count_training(self, tokens: int) -> None:
        """Count a finished training completion of so many tokens."""
        self._training_tokens += tokens

    def count_validation(self, tokens: int) -> None:
        """Count a finished validation completion of so many tokens."""
        self._validation_tokens += tokens

    def charge_startup(self) -> None:
        """Charge the time until the engines serve the first weights of this attempt."""
        self._charge_all("startup", "startup")

    def charge_produce(self, batch: int) -> None:
        """Charge the production of batch number `batch`. The charge is on disk when this returns."""
        self._batches = batch + 1
        self._split("produce")
        self.ledger.sync()

    def charge_train(self, batch: int, step: int) -> BatchTime:
        """Charge the training of batch number `batch`, after which the policy is at `step`; both its windows.

        A window that repeats work charged in an earlier attempt is `lost`.
        """
        self._batches, self._step = batch + 1, step
        if self.ledger.is_charged(self._batches):
            self.charge_replay()
        else:
            self._split("train")
        finished, self._batch = self._batch, BatchTime()
        return finished

    def charge_replay(self) -> None:
        """Charge time spent on catching up with the previous attempt as lost."""
        self._charge_all("replay", "lost")

    def charge_validation(self) -> None:
        """Charge a validation with nothing else in progress."""
        self._split("validate")

    def charge_crash(self) -> None:
        """Charge the window in which the attempt failed as lost."""
        self._charge_all("crash", "lost")

    async def beat(self) -> None:
        """The heartbeat loop: record at once and every HEARTBEAT_S that all devices are still held, until cancelled.

        Consumes nothing. Waits for the clock alone, so no other loop can block it. A crash then leaves at most
        HEARTBEAT_S uncharged.
        """
        while True:
            with contextlib.suppress(OSError):  # a full disk may recover; a charge that cannot be written raises
                self.ledger.heartbeat(
                    batch=self._batches,
                    step=self._step,
                    devices=self._trainer + self._engine_devices,
                    seconds=self.elapsed,
                )
            await asyncio.sleep(HEARTBEAT_S)

    def _charge_all(self, phase: Phase, role: Role) -> None:
        self._write(phase, self.elapsed, [(role, self._trainer + self._engine_devices)])

    def _split(self, phase: Phase) -> None:
        seconds, tokens = self.elapsed, self._training_tokens + self._validation_tokens
        engine = self._engine_devices
        validating = engine * self._validation_tokens / tokens if tokens else 0.0
        pinned = self._trainer * min(1.0, self.pinned_seconds / seconds) if seconds > 0 else 0.0
        devices: list[tuple[Role, float]] = [("validation", validating + pinned)] if validating or pinned else []
        devices += [("engine", engine - validating), ("trainer", self._trainer - pinned)]
        self._write(phase, seconds, devices)

    def _write(self, phase: Phase, seconds: float, devices: list[tuple[Role, float]]) -> None:
        self.ledger.charge(batch=self._batches, step=self._step, phase=phase, seconds=seconds, devices=devices)
        if phase in ("produce", "train", "replay"):
            tokens = self._training_tokens + self._validation_tokens
            self._batch = BatchTime(seconds=self._batch.seconds + seconds, tokens=self._batch.tokens + tokens)
        self._since += seconds
        self._engine_since, self._engine_seconds = self._since, 0.0
        self._training_tokens = self._validation_tokens = 0
        self.pinned_seconds = 0.0


@contextlib.asynccontextmanager
async def metering(meter: Meter) -> AsyncIterator[None]:
    """Heartbeats inside the block. If it raises, the current window is charged as lost."""
    heartbeats = asyncio.create_task(meter.beat(), name="heartbeat")
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # for example a full disk: report the error that ends the block instead
            meter.charge_crash()
        raise
    finally:
        heartbeats.cancel()
        await asyncio.gather(heartbeats, return_exceptions=True)

"""The meter: measures the windows between two charges and splits each between the ledger's roles.

A batch has two windows: `produce`, until it is composed, and `train`, its optimizer step and weight update. In each
the trainer's and the engines' devices are charged for the whole window. Where a validation ran in it, the engines'
time is split between `validation` and `engine` by the tokens that each generated; the trainer's time goes to
`validation` while it stands still because a validation pins the version.

A task writes a heartbeat every few seconds, so that a crash leaves no time uncharged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from megatron_scalerl.controller.ledger import Ledger, Phase, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTime:
    """Both windows of one batch together."""

    seconds: float
    """Wall time."""
    tokens: int
    """Tokens of the completions that were finished in it, validation's included."""


HEARTBEAT_S = 10.0
"""Seconds between heartbeats: what a crash leaves uncharged at most."""


class Meter:
    """Charges everything that the run holds, window by window, from `held_since` on."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        trainer_devices: int,
        engine_devices: int,
        batches: int,
        step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """batches, step: of the checkpoint that the attempt starts from. clock: seconds, never going back."""
        self.ledger = ledger
        self.clock = clock
        self._training_tokens = self._validation_tokens = 0
        self._batch = BatchTime(seconds=0.0, tokens=0)
        self.pinned_seconds = 0.0
        """Time in the present window in which the trainer waited for a validation."""
        self._trainer, self._engine = trainer_devices, engine_devices
        self._since = clock()
        self._batches, self._step = batches, step

    @property
    def elapsed(self) -> float:
        """Seconds since the last charge."""
        return self.clock() - self._since

    def count_training(self, tokens: int) -> None:
        """A training completion of so many tokens was finished."""
        self._training_tokens += tokens

    def count_validation(self, tokens: int) -> None:
        """A completion of so many tokens was finished for a validation."""
        self._validation_tokens += tokens

    def startup(self) -> None:
        """Charge what was held until the first weights of this attempt were served."""
        self._write("startup", self.elapsed, [("startup", self._trainer + self._engine)])

    def produced(self, batch: int) -> None:
        """Batch number `batch` is composed. The charge is on the disk when this returns."""
        self._batches = batch + 1
        self._split("produce")
        self.ledger.sync()

    def trained(self, batch: int, step: int) -> BatchTime:
        """Batch number `batch` is done with and the policy is at `step`; the time since the batch before.

        A window that repeats what an earlier attempt was charged for is `lost`.
        """
        self._batches, self._step = batch + 1, step
        if self.ledger.is_charged(self._batches):
            self.repeated()
        else:
            self._split("train")
        done, self._batch = self._batch, BatchTime(seconds=0.0, tokens=0)
        return done

    def repeated(self) -> None:
        """Charge time that passed only because an attempt has to catch up with the one before: it is lost."""
        self._write("replay", self.elapsed, [("lost", self._trainer + self._engine)])

    def validated(self) -> None:
        """Charge a validation that nothing else ran beside."""
        self._split("validate")

    def abandon(self) -> None:
        """The attempt ends in the middle of a window: it is lost."""
        self._write("crash", self.elapsed, [("lost", self._trainer + self._engine)])

    async def beat(self) -> None:
        """Write heartbeats until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(OSError):  # a full disk may have room again; a charge that fails ends the run
                self.ledger.heartbeat(
                    batch=self._batches, step=self._step, devices=self._trainer + self._engine, seconds=self.elapsed
                )

    def _split(self, phase: Phase) -> None:
        seconds, tokens = self.elapsed, self._training_tokens + self._validation_tokens
        validating = self._engine * self._validation_tokens / tokens if tokens else 0.0
        pinned = self._trainer * min(1.0, self.pinned_seconds / seconds) if seconds > 0 else 0.0
        devices: list[tuple[Role, float]] = [("validation", validating + pinned)] if validating or pinned else []
        devices += [("engine", self._engine - validating), ("trainer", self._trainer - pinned)]
        self._write(phase, seconds, devices)

    def _write(self, phase: Phase, seconds: float, devices: list[tuple[Role, float]]) -> None:
        self.ledger.charge(batch=self._batches, step=self._step, phase=phase, seconds=seconds, devices=devices)
        if phase in ("produce", "train", "replay"):
            tokens = self._training_tokens + self._validation_tokens
            self._batch = BatchTime(seconds=self._batch.seconds + seconds, tokens=self._batch.tokens + tokens)
        self._since += seconds
        self._training_tokens = self._validation_tokens = 0
        self.pinned_seconds = 0.0


@contextlib.asynccontextmanager
async def metering(meter: Meter) -> AsyncIterator[None]:
    """Heartbeats inside the block; a window that an error cuts off is lost."""
    beating = asyncio.create_task(meter.beat(), name="heartbeat")
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk, say: the error that ends the block is the one to report
            meter.abandon()
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

"""Measures the windows between two charges and splits each window between the ledger's roles.

A batch has two windows: `produce`, until it is composed, and `train`, its optimizer step and weight update. In each
window the devices of trainer and engines are charged for the whole time. If a validation ran in it, engine time is
split between `validation` and `engine` in proportion to the tokens generated for each; trainer time counts as
`validation` while the trainer waits for the validation.

The time of an engine that is held at a version (`measure`) is charged apart: to `validation`, `evaluation` and,
for the training completions that were in flight on it, `engine`, in proportion to the tokens that it finished for
each in the window; to the measurement where it finished none. The other engines' time is then the training's.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Literal

from megatron_scalerl.controller.ledger import Ledger, Phase, Role
from megatron_scalerl.controller.run_folder import ResumePoint
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.launch.placement import Devices
from megatron_scalerl.processes.child_process import cancelled
from megatron_scalerl.processes.loop_watch import LoopLag
from megatron_scalerl.record import record

HEARTBEAT_S = 10.0
"""Seconds between heartbeats: the longest time that a crash leaves uncharged."""


@record
class BatchTime:
    """Both windows of one batch together."""

    seconds: float = 0.0
    """Wall time."""
    tokens: int = 0
    """Tokens of the completions that finished in it, validation included."""


Purpose = Literal["validation", "evaluation"]


class _Hold:
    """An engine that is held, since it was charged last."""

    def __init__(self, engine: EngineClient, devices: float, purpose: Purpose, now: float):
        self.purpose = purpose
        self._engine = engine
        self._devices = devices
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._received = self._engine.received_tokens
        self.measured: dict[Role, int] = {"validation": 0, "evaluation": 0}
        """Tokens of finished completions."""

    def close(self, now: float) -> tuple[dict[Role, float], int]:
        """(role -> its device-seconds since the last call, tokens that it finished for training)."""
        seconds = self._devices * (now - self._since)
        training = max(0, self._engine.received_tokens - self._received - sum(self.measured.values()))
        tokens = {**self.measured, "engine": training}
        total = sum(tokens.values())
        purpose: Role = self.purpose
        self._begin(now)
        if not total:
            return {purpose: seconds}, 0
        return {role: seconds * (count / total) for role, count in tokens.items()}, training


class Meter:
    """Charges all devices of the run to the ledger, window by window, from its construction on, or `since`."""

    def __init__(
        self,
        ledger: Ledger,
        devices: Devices,
        start: ResumePoint,
        *,
        since: float | None = None,
        lag: LoopLag | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """start: the checkpoint to resume from. since: by the clock, since when the devices are held: the end of
        the attempt before it in this process, for the first one the job's start. None: from now on. clock: monotonic
        seconds."""
        self.ledger = ledger
        self.lag = lag or LoopLag()
        """Of the event loop, since the last batch."""
        self._clock = clock
        self._training_tokens = self._validation_tokens = 0
        self._batch = BatchTime()
        self.pinned_seconds = 0.0
        """Seconds of the current window in which the trainer waited for a validation."""
        self._trainer = devices.trainer
        self._engine = devices.engine
        self._since = clock() if since is None else since
        self._engine_since = self._since
        self._engine_seconds = 0.0  # of the current window
        self._holds: dict[EngineClient, _Hold] = {}
        self._apart: dict[Role, float] = {}  # device-seconds of engines that are held, in the current window
        self._apart_tokens = 0  # of training, finished on them
        self._held_tokens = 0  # of measurements, finished on them
        self._batches = start.batches
        self._step = start.step

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

    def hold_engine_devices(self, count: float) -> None:
        """From now on, the engines hold so many devices: one joined, or its host left the run for good."""
        now = self._clock()
        self._engine_seconds += self._engine * (now - self._engine_since)
        self._engine = count
        self._engine_since = now

    def hold(self, engine: EngineClient, devices: float, purpose: Purpose) -> None:
        """From now on, this engine is held for measurements, first of all for this one."""
        self._holds[engine] = _Hold(engine, devices, purpose, self._clock())

    def release(self, engine: EngineClient) -> None:
        """An engine that was held is no more."""
        self._close_holds()
        del self._holds[engine]

    def count_measured(self, purpose: Purpose, tokens: int, engine: EngineClient | None = None) -> None:
        """Count a finished completion of a measurement. engine: the one that is held for it, else a validation is on
        all of them."""
        if engine is None:
            self._validation_tokens += tokens
            return
        hold = self._holds[engine]
        hold.purpose = purpose
        hold.measured[purpose] += tokens
        self._held_tokens += tokens

    def _close_holds(self) -> None:
        for hold in self._holds.values():
            roles, training = hold.close(self._clock())
            for role, seconds in roles.items():
                self._apart[role] = self._apart.get(role, 0.0) + seconds
            self._apart_tokens += training

    def count_training(self, tokens: int) -> None:
        """Count a finished training completion of so many tokens."""
        self._training_tokens += tokens

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
        self._batches = batch + 1
        self._step = step
        if self.ledger.is_charged(self._batches):
            self.charge_replay()
        else:
            self._split("train")
        finished = self._batch
        self._batch = BatchTime()
        return finished

    def charge_replay(self) -> None:
        """Charge time spent on catching up with the previous attempt as lost."""
        self._charge_all("replay", "lost")

    def charge_validation(self) -> None:
        """Charge a validation with nothing else in progress."""
        self._split("validate")

    def charge_waiting(self, purpose: Purpose) -> None:
        """Charge the time after the training in which the run waited for a measurement on an engine that is held."""
        self._charge_all("validate", purpose)

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
        self._close_holds()
        seconds = self.elapsed
        apart = {role: held / seconds if seconds > 0 else 0.0 for role, held in self._apart.items()}
        engine = max(0.0, self._engine_devices - sum(apart.values()))  # of the engines that are not held
        training = max(0, self._training_tokens - self._apart_tokens)
        tokens = training + self._validation_tokens
        validating = engine * self._validation_tokens / tokens if tokens else 0.0
        pinned = self._trainer * min(1.0, self.pinned_seconds / seconds) if seconds > 0 else 0.0
        validation = validating + pinned + apart.get("validation", 0.0)
        evaluation = apart.get("evaluation", 0.0)
        devices: list[tuple[Role, float]] = [("validation", validation)] if validation else []
        devices += [("evaluation", evaluation)] if evaluation else []
        devices += [("engine", engine - validating + apart.get("engine", 0.0)), ("trainer", self._trainer - pinned)]
        self._write(phase, seconds, devices)

    def _write(self, phase: Phase, seconds: float, devices: list[tuple[Role, float]]) -> None:
        self._close_holds()  # what is charged as a whole, too, ends the window
        self.ledger.charge(batch=self._batches, step=self._step, phase=phase, seconds=seconds, devices=devices)
        if phase in ("produce", "train", "replay"):
            tokens = self._training_tokens + self._validation_tokens + self._held_tokens
            self._batch = BatchTime(seconds=self._batch.seconds + seconds, tokens=self._batch.tokens + tokens)
        self._since += seconds
        self._engine_since = self._since
        self._engine_seconds = 0.0
        self._training_tokens = self._validation_tokens = self._held_tokens = self._apart_tokens = 0
        self._apart = {}
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
        await cancelled(heartbeats)

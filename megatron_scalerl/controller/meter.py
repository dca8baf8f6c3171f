"""Measures the windows between two charges and splits each window between the ledger's roles.

A batch has two windows: `produce`, until the batch is composed, and `train`, for the optimizer step and the weight
update. In each window the devices of trainer and engines are charged for the whole time. If a validation ran in the
window, engine time is split between `validation` and `engine` in proportion to the tokens generated for each; trainer
time counts as `validation` while the trainer waits for the validation.

The time of an engine that is held at a version (`measure`) is charged separately: to `validation`, `evaluation` and,
for training completions in flight on the held engine, `engine`, in proportion to the tokens that the engine finished
for each in the window; to the measurement if the engine finished no token. All other engines' time goes to training.

The life of a window: the window begins with the previous charge, counts tokens (`count_training`, `count_measured`),
pinned seconds, held engines and joining or leaving devices, and ends in `_write`, which charges the window and clears
all counts.
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
"""Seconds between heartbeats. A crash leaves at most this time uncharged."""
Purpose = Literal["validation", "evaluation"]
"""Kinds of measurements."""


@record
class BatchTime:
    """Time and tokens of a batch, summed over the batch's windows `produce` and `train`."""

    seconds: float = 0.0
    """Wall time (s)."""
    tokens: int = 0
    """Tokens of completions that finished in the windows, validation included."""


class _Hold:
    """A held engine, and the engine's tokens since the last charge."""

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
        """(role -> device-seconds, number of finished tokens of training), both since the last call."""
        seconds = self._devices * (now - self._since)
        # A completion of a measurement may be received in one window and, after scoring, counted in the next window.
        training = max(0, self._engine.received_tokens - self._received - sum(self.measured.values()))
        tokens = {**self.measured, "engine": training}
        total = sum(tokens.values())
        self._begin(now)
        if not total:
            return {self.purpose: seconds}, 0
        return {role: seconds * (count / total) for role, count in tokens.items()}, training


class Meter:
    """Charges all devices of the run to the ledger, window by window, from `since` on."""

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
        """start: the checkpoint to resume from. since: the time, by the clock, from which on the devices are held:
        the end of this process's previous attempt, for the first attempt the job's start. None: from now on. clock:
        monotonic seconds."""
        self.ledger = ledger
        self.lag = lag or LoopLag()
        """Lag of the event loop since the last batch."""
        self._clock = clock
        self._since = clock() if since is None else since
        self._batch = BatchTime()
        self._batches = start.batches
        self._step = start.step
        self._trainer = devices.trainer
        self._engine = devices.engine
        self._teacher = devices.teacher
        self._holds: dict[EngineClient, _Hold] = {}
        self._clear()

    def _clear(self) -> None:
        """Begin a window at `_since`."""
        self.pinned_seconds = 0.0
        """Seconds in which the trainer waited for a validation."""
        self._training_tokens = 0
        self._validation_tokens = 0
        self._engine_since = self._since
        self._engine_seconds = 0.0
        """Device-seconds of the engines until `_engine_since`, the last change of the engines' devices."""
        self._held_seconds: dict[Role, float] = {}
        """Role -> device-seconds of held engines."""
        self._held_training_tokens = 0
        """Tokens of training that finished on held engines."""
        self._held_measured_tokens = 0
        """Tokens of measurements that finished on held engines."""

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
        """From now on, the engines hold `count` devices: an engine joined, or a host left the run for good."""
        now = self._clock()
        self._engine_seconds += self._engine * (now - self._engine_since)
        self._engine = count
        self._engine_since = now

    def hold(self, engine: EngineClient, devices: float, purpose: Purpose) -> None:
        """From now on, this engine is held for measurements, first for `purpose`."""
        self._holds[engine] = _Hold(engine, devices, purpose, self._clock())

    def release(self, engine: EngineClient) -> None:
        """From now on, this engine is held no longer, and is charged like all engines."""
        self._close_holds()
        del self._holds[engine]

    def count_measured(self, purpose: Purpose, tokens: int, engine: EngineClient | None = None) -> None:
        """Count a finished completion of a measurement. engine: the held engine; None if all engines validate."""
        if engine is None:
            self._validation_tokens += tokens
            return
        hold = self._holds[engine]
        hold.purpose = purpose
        hold.measured[purpose] += tokens
        self._held_measured_tokens += tokens

    def _close_holds(self) -> None:
        for hold in self._holds.values():
            roles, training = hold.close(self._clock())
            for role, seconds in roles.items():
                self._held_seconds[role] = self._held_seconds.get(role, 0.0) + seconds
            self._held_training_tokens += training

    def count_training(self, tokens: int) -> None:
        """Count a finished completion of training."""
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
        """Charge the training of batch number `batch`, after which the policy is at `step`; returns time and tokens.

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
        """Charge as lost the time in which this attempt caught up with the previous attempt."""
        self._charge_all("replay", "lost")

    def charge_validation(self) -> None:
        """Charge a validation with nothing else in progress."""
        self._split("validate")

    def charge_waiting(self, purpose: Purpose) -> None:
        """Charge the time after the training in which the run waited for a measurement on a held engine."""
        self._charge_all("validate", purpose)

    def charge_crash(self) -> None:
        """Charge as lost the window in which the attempt failed."""
        self._charge_all("crash", "lost")

    async def beat(self) -> None:
        """The heartbeat loop: record at once and every HEARTBEAT_S that all devices are still held, until cancelled.

        Consumes nothing. Waits for the clock alone, so no other loop can block the heartbeat. A crash then leaves at
        most HEARTBEAT_S uncharged.
        """
        while True:
            # A full disk may recover, so a heartbeat may fail; a charge that cannot be written raises.
            with contextlib.suppress(OSError):
                self.ledger.heartbeat(
                    batch=self._batches,
                    step=self._step,
                    devices=self._trainer + self._teacher + self._engine_devices,
                    seconds=self.elapsed,
                )
            await asyncio.sleep(HEARTBEAT_S)

    def _charge_all(self, phase: Phase, role: Role) -> None:
        self._write(phase, self.elapsed, [(role, self._trainer + self._teacher + self._engine_devices)])

    def _split(self, phase: Phase) -> None:
        """Charge the window to the roles that used the devices; each charge is a mean number of devices."""
        self._close_holds()
        seconds = self.elapsed
        on_held = {}
        pinned = 0.0
        if seconds > 0:
            on_held = {role: device_seconds / seconds for role, device_seconds in self._held_seconds.items()}
            pinned = self._trainer * min(1.0, self.pinned_seconds / seconds)
        # All engines that are not held share the window's tokens without the tokens of held engines.
        engine = max(0.0, self._engine_devices - sum(on_held.values()))
        training = max(0, self._training_tokens - self._held_training_tokens)
        validating = engine * self._validation_tokens / max(1, training + self._validation_tokens)
        devices: list[tuple[Role, float]] = [
            ("validation", validating + pinned + on_held.get("validation", 0.0)),
            ("evaluation", on_held.get("evaluation", 0.0)),
            ("teacher", self._teacher),
        ]
        devices = [charge for charge in devices if charge[1]]
        # The trainer's charge comes last and marks the window as complete (`ledger`).
        devices += [("engine", engine - validating + on_held.get("engine", 0.0)), ("trainer", self._trainer - pinned)]
        self._write(phase, seconds, devices)

    def _write(self, phase: Phase, seconds: float, devices: list[tuple[Role, float]]) -> None:
        # A window that is charged as a whole also ends for held engines.
        self._close_holds()
        self.ledger.charge(batch=self._batches, step=self._step, phase=phase, seconds=seconds, devices=devices)
        if phase in ("produce", "train", "replay"):
            tokens = self._training_tokens + self._validation_tokens + self._held_measured_tokens
            self._batch = BatchTime(seconds=self._batch.seconds + seconds, tokens=self._batch.tokens + tokens)
        # The clock's present time is not used, so that no time between two windows is left uncharged.
        self._since += seconds
        self._clear()


@contextlib.asynccontextmanager
async def metering(meter: Meter) -> AsyncIterator[None]:
    """A block with heartbeats. If the block raises, the current window is charged as lost."""
    heartbeats = asyncio.create_task(meter.beat(), name="heartbeat")
    try:
        yield
    except BaseException:
        # The error may be a full disk. The caller then gets the error that ended the block.
        with contextlib.suppress(OSError):
            meter.charge_crash()
        raise
    finally:
        await cancelled(heartbeats)

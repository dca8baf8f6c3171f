"""Measures windows of time and splits the device time of each window between the ledger's roles. A window lasts from
one charge to the next.

A batch has two windows: `produce`, until the batch is composed, and `train`, for the optimizer step and the weight
update. In each window the devices of trainer and engines are charged for the whole time. If a validation ran in the
window, engine time is split between `validation` and `engine` in proportion to the tokens generated for each; trainer
time counts as `validation` while the trainer waits for the validation.

The time of an engine that is held at a version (`measure`) is charged separately. This time is split between
`validation`, `evaluation` and, for training completions still in flight on the engine, `engine`, in proportion to the
tokens that the engine finished for each role in the window. Without a finished token, all of the time goes to the
measurement.

The life of a window: the window begins with the previous charge; counts tokens (`count_training`, `count_measured`),
seconds in which the trainer waits for a validation, time of held engines, and devices that join or leave; and ends in
`_write`, which charges the window and clears all counts.
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
"""The kinds of measurements of a policy version."""


@record
class BatchTime:
    """Wall time and tokens of a batch, summed over the batch's windows `produce` and `train`."""

    seconds: float = 0.0
    """Wall time (s)."""
    tokens: int = 0
    """Tokens of completions that finished in the two windows, completions of measurements included."""


class _Hold:
    """The devices, time and tokens of a held engine since the last charge."""

    def __init__(self, engine: EngineClient, devices: float, purpose: Purpose, now: float):
        self.purpose = purpose
        self._engine = engine
        self._devices = devices
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._received = self._engine.received_tokens
        self.measured: dict[Role, int] = {"validation": 0, "evaluation": 0}
        """Role -> tokens of the completions that finished for measurements."""

    def close(self, now: float) -> tuple[dict[Role, float], int]:
        """Returns (role -> device-seconds, tokens of completions received for training), both since the last call."""
        seconds = self._devices * (now - self._since)
        # A measurement's completion may be received in one window and counted, after scoring, in the next. The
        # difference may then be negative.
        training = max(0, self._engine.received_tokens - self._received - sum(self.measured.values()))
        tokens = {**self.measured, "engine": training}
        total = sum(tokens.values())
        self._begin(now)
        if not total:
            return {self.purpose: seconds}, 0
        return {role: seconds * (count / total) for role, count in tokens.items()}, training


class Meter:
    """Charges all devices of the run to the ledger, window by window."""

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
        """start: the checkpoint to resume from. since: start of the first window, in seconds of `clock`: the end of
        this process's previous attempt, or the job's start for the first attempt; None for now. clock: returns
        monotonic seconds."""
        self.ledger = ledger
        self.lag = lag or LoopLag()
        """Measures the largest lag of the event loop in each batch."""
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
        """Set all counts to zero for a new window, which begins at `_since`."""
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
        """Note that the engines hold `count` devices from now on, after an engine joined or a host left for good."""
        now = self._clock()
        self._engine_seconds += self._engine * (now - self._engine_since)
        self._engine = count
        self._engine_since = now

    def hold(self, engine: EngineClient, devices: float, purpose: Purpose) -> None:
        """Note that this engine is held for measurements from now on, first for `purpose`."""
        self._holds[engine] = _Hold(engine, devices, purpose, self._clock())

    def release(self, engine: EngineClient) -> None:
        """Note that the engine is no longer held, and charge the engine like all serving engines from now on."""
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
        """Charge the production of batch number `batch`, and sync the ledger to disk."""
        self._batches = batch + 1
        self._split("produce")
        self.ledger.sync()

    def charge_train(self, batch: int, step: int) -> BatchTime:
        """Charge the training of batch number `batch`, after which the policy is at `step`; returns time and tokens.

        If an earlier attempt has charged the same batch, the window is charged as `lost`.
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
        """Charge a window of no batch: a validation for which new groups wait, or the work at the end of the run."""
        self._split("validate")

    def charge_waiting(self, purpose: Purpose) -> None:
        """After the last step, charge all devices to a measurement on a held engine that the run waited for."""
        self._charge_all("validate", purpose)

    def charge_crash(self) -> None:
        """Charge as lost the window in which the attempt failed."""
        self._charge_all("crash", "lost")

    async def beat(self) -> None:
        """The heartbeat loop: record at once and every HEARTBEAT_S that all devices are still held, until cancelled.

        The loop waits for the clock alone, so no other loop can block the heartbeat. After a crash at most
        HEARTBEAT_S of the devices' time are uncharged.
        """
        while True:
            # A failed heartbeat does not end the run, since space on a full disk may become free before the next
            # charge.
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
        """Charge the window to the roles that used the devices, each with the role's mean number of devices."""
        self._close_holds()
        seconds = self.elapsed
        on_held = {}
        pinned = 0.0
        if seconds > 0:
            on_held = {role: device_seconds / seconds for role, device_seconds in self._held_seconds.items()}
            pinned = self._trainer * min(1.0, self.pinned_seconds / seconds)
        # Engines that are not held are charged by the tokens that held engines did not generate.
        engine = max(0.0, self._engine_devices - sum(on_held.values()))
        training = max(0, self._training_tokens - self._held_training_tokens)
        validating = engine * self._validation_tokens / max(1, training + self._validation_tokens)
        devices: list[tuple[Role, float]] = [
            ("validation", validating + pinned + on_held.get("validation", 0.0)),
            ("evaluation", on_held.get("evaluation", 0.0)),
            ("teacher", self._teacher),
        ]
        devices = [charge for charge in devices if charge[1]]
        # The trainer's charge comes last, so that a ledger with this charge has the complete window.
        devices += [("engine", engine - validating + on_held.get("engine", 0.0)), ("trainer", self._trainer - pinned)]
        self._write(phase, seconds, devices)

    def _write(self, phase: Phase, seconds: float, devices: list[tuple[Role, float]]) -> None:
        # `_charge_all` calls this without `_split`, so the counts of held engines are closed here, too.
        self._close_holds()
        self.ledger.charge(batch=self._batches, step=self._step, phase=phase, seconds=seconds, devices=devices)
        if phase in ("produce", "train", "replay"):
            tokens = self._training_tokens + self._validation_tokens + self._held_measured_tokens
            self._batch = BatchTime(seconds=self._batch.seconds + seconds, tokens=self._batch.tokens + tokens)
        # The next window begins exactly where this window ended, not at the present time, so no time is left
        # uncharged.
        self._since += seconds
        self._clear()


@contextlib.asynccontextmanager
async def metering(meter: Meter) -> AsyncIterator[None]:
    """Write heartbeats to the ledger during the block. If the block raises, charge the current window as lost."""
    heartbeats = asyncio.create_task(meter.beat(), name="heartbeat")
    try:
        yield
    except BaseException:
        # If the charge also fails, for example on a full disk, the caller gets the error that ended the block.
        with contextlib.suppress(OSError):
            meter.charge_crash()
        raise
    finally:
        await cancelled(heartbeats)

"""The ledger: the devices that the run held, in device-hours by role and batch.

The ledger charges the devices of the fleet, busy or idle: devices x wall time, from the start of the processes on, in
a Slurm job from the start of the job. With GPUs a device is a GPU and the unit is GPU-hours; without GPUs a device is
one trainer or engine process and the unit is device-hours. The compute axis is the sum of `trainer` and `engine`. The
time until the engines serve the first weights of an attempt (`startup`), validation, and work that a crash discarded
(`lost`) are separate roles. (Khatri et al. 2025 count steps x a constant per setup.)

Every charge belongs to a batch of the journal, and a restart trains the journal's batches again with the recorded
rollouts. So a batch keeps its charges: a crash removes no charge from the axis. Repeated work counts once: the first
time stays on the axis, the repetition is `lost`. The time between the last charge and a crash is `lost` as well, up
to the last heartbeat row in the file.
"""

import dataclasses
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, rewrite
from megatron_scalerl.record import record
from megatron_scalerl.types import ComputeUnit

Role = Literal["startup", "trainer", "engine", "teacher", "validation", "evaluation", "lost"]
Phase = Literal["startup", "produce", "train", "validate", "replay", "crash"]


@record
class Charge:
    """The devices that one role held in one window of time."""

    batch: int
    """Batches of the run up to the end of the window. The window belongs to batch number `batch` - 1."""
    step: int
    """The optimizer step of the window."""
    phase: Phase
    """`produce`: until the batch is composed. `train`: step and weight update. `validate`: a validation with
    nothing else in progress. `startup`, `replay`: see the module. `crash`: the window that a crash cut off."""
    role: Role
    devices: float
    """Number of devices. The number is a fraction where a window was split between roles."""
    seconds: float
    """Wall time (s)."""
    incarnation: str
    """The attempt that held the devices."""

    @property
    def hours(self) -> float:
        """Device-hours."""
        return self.devices * self.seconds / 3600


class Ledger:
    """RUN/ledger.jsonl: a header line with the unit, then one charge per line, and heartbeats since the last charge.

    The charges of one window are written together. The trainer's charge comes last and marks the window as complete.
    """

    def __init__(self, path: Path, unit: ComputeUnit, *, incarnation: str):
        """Open or create the file, and charge the time that a crash left uncharged.

        Raises ValueError for a file in another unit, and for a row that is no charge.
        """
        self.path = path
        self.unit = unit
        self._incarnation = incarnation
        header, *rows = read_jsonl(self.path) or [{"unit": unit}]
        if header.get("unit") != unit:
            raise ValueError(
                f"{path}: the run was charged in {header.get('unit')} so far, but would now be charged in {unit}; "
                "resume the run on the kind of device (GPU or CPU) on which the run began"
            )
        self._hours: dict[Role, float] = defaultdict(float)
        self._axis = array("d")
        """Batch -> device-hours on the forecast's compute axis. Only these sums stay in memory: a month has
        100,000 charges."""
        self._trained = 0
        charges = _recovered(self.path, rows)
        self._add(charges)
        rewrite(self.path, [{"unit": unit}, *map(_row, charges)])
        self._file = JsonlWriter(self.path)

    def charge(
        self, *, batch: int, step: int, phase: Phase, seconds: float, devices: Iterable[tuple[Role, float]]
    ) -> None:
        """Append the charges of one window of `seconds`: (role, devices), the trainer's last.

        Memory holds the rounded numbers of the file, so that no sum falls when a restart reads the file.
        """
        charges = [
            Charge(
                batch=batch,
                step=step,
                phase=phase,
                role=role,
                devices=round(count, 6),
                seconds=round(seconds, 6),
                incarnation=self._incarnation,
            )
            for role, count in devices
        ]
        # A crash may leave only some of the charges on disk, see `_recovered`.
        self._file.append(*map(_row, charges))
        self._add(charges)

    def heartbeat(self, *, batch: int, step: int, devices: float, seconds: float) -> None:
        """Record that all devices are still held `seconds` after the last charge."""
        self._file.append({"heartbeat": round(seconds, 6), "devices": devices, "batch": batch, "step": step})

    def sync(self) -> None:
        """Return when every row is on disk."""
        self._file.sync()

    def hours(self, *roles: Role) -> float:
        """Device-hours of the given roles so far; without arguments, of all roles."""
        return math.fsum(self._hours[role] for role in roles or self._hours)

    def seconds(self) -> dict[str, float]:
        """Role -> device-seconds so far, in all attempts."""
        return {role: 3600 * self._hours.get(role, 0.0) for role in get_args(Role)}

    def axis_at(self, batches: int) -> float:
        """The forecast's compute axis (device-hours) after the first `batches` batches of the run.

        The axis counts trainer and engine, without validation and lost work.
        """
        return math.fsum(self._axis[: batches + 1])

    def is_charged(self, batches: int) -> bool:
        """True if the training of batch number `batches` - 1 is charged, so that more training is a repetition."""
        return batches <= self._trained

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, charges: Iterable[Charge]) -> None:
        for charge in charges:
            self._hours[charge.role] += charge.hours
            if charge.role in ("trainer", "engine"):
                self._axis.extend([0.0] * (charge.batch + 1 - len(self._axis)))
                self._axis[charge.batch] += charge.hours
            if charge.role == "trainer" and charge.phase == "train":
                self._trained = max(self._trained, charge.batch)


def _row(charge: Charge) -> dict[str, Any]:
    return dataclasses.asdict(charge) | {"hours": charge.hours}


def _recovered(path: Path, rows: Iterable[dict[str, Any]]) -> list[Charge]:
    """The charges of a file. An incomplete last window and the time until the last heartbeat become `lost`."""
    charges = []
    complete = 0
    heartbeat: Charge | None = None
    incarnation = ""
    for number, row in enumerate(rows, 2):
        charge = _charge(f"{path} line {number}", row, incarnation)
        if "heartbeat" in row:
            heartbeat = charge
            continue
        # The time of a later charge includes the time of the heartbeat.
        heartbeat = None
        incarnation = charge.incarnation
        charges.append(charge)
        # A charge of the trainer, or of all devices, is the last charge of its window.
        if charge.role not in ("engine", "teacher", "validation", "evaluation"):
            complete = len(charges)
    charges[complete:] = [dataclasses.replace(c, role="lost", phase="crash") for c in charges[complete:]]
    if heartbeat is not None:
        charges.append(heartbeat)
    return charges


def _charge(location: str, row: dict[str, Any], incarnation: str) -> Charge:
    """A row as a charge. A heartbeat becomes a charge for the lost time of the attempt `incarnation`."""
    if "heartbeat" in row:
        row |= {"seconds": row["heartbeat"], "role": "lost", "phase": "crash", "incarnation": incarnation}
    try:
        return msgspec.convert(row, Charge)
    except msgspec.ValidationError as error:
        raise ValueError(f"{location}: the row is neither a charge nor a heartbeat: {error}") from None

"""The ledger: the devices that the run held, in device-hours by role and batch.

The ledger charges all devices of trainer and engines, busy or idle: devices x wall time from the start of the
processes, or of the Slurm job. With GPUs a device is a GPU and the unit is GPU-hours; without GPUs a device is one
trainer or engine process and the unit is device-hours. The forecast's compute axis is the sum of the roles `trainer`
and `engine`. The time until the engines serve the first weights of an attempt (`startup`), validation, and work that
a crash discarded (`lost`) are roles that do not count on this axis. (Khatri et al. 2025 count the number of steps
times a constant per setup.)

Every charge belongs to a batch of the journal, and a restart trains the journal's batches again with the recorded
rollouts. So a crash removes no charge from the axis. Repeated work counts once: the first time stays on the axis,
the repetition is charged as `lost`. The time between the last charge and a crash is also charged as `lost`, up to the
last heartbeat row in the file.
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
    """Number of batches that the run has begun when the window ends. The window is charged to the last of the
    batches, which has number `batch` - 1 (from 0)."""
    step: int
    """Number of optimizer steps of the run when the window ended."""
    phase: Phase
    """`produce`: until the batch is composed. `train`: step and weight update. `validate`: a validation that the run
    waits for. `startup`: until the engines serve. `replay`: a batch of an earlier attempt is trained again. `crash`:
    a crash ended the window."""
    role: Role
    devices: float
    """Mean number of devices of the role in the window; a fraction if devices were shared by several roles."""
    seconds: float
    """Wall time (s)."""
    incarnation: str
    """The attempt that held the devices."""

    @property
    def hours(self) -> float:
        """Device-hours."""
        return self.devices * self.seconds / 3600


class Ledger:
    """RUN/ledger.jsonl: a header line with the unit, then a line for each charge and each heartbeat.

    The charges of one window are written together. The trainer's charge comes last and marks the window as complete.
    """

    def __init__(self, path: Path, unit: ComputeUnit, *, incarnation: str):
        """Open or create the file, and charge the time that a crash left uncharged.

        Raises ValueError if the file's unit is not `unit`, or if a row is neither a charge nor a heartbeat.
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
        """Batch -> device-hours on the forecast's compute axis. The charges are not kept in memory, since a run of
        a month makes about 100,000 charges."""
        self._trained = 0
        charges = _recovered(self.path, rows)
        self._add(charges)
        rewrite(self.path, [{"unit": unit}, *map(_row, charges)])
        self._file = JsonlWriter(self.path)

    def charge(
        self, *, batch: int, step: int, phase: Phase, seconds: float, devices: Iterable[tuple[Role, float]]
    ) -> None:
        """Append the charges of one window of `seconds`. devices: (role, number of devices), the trainer's last.

        The sums in memory are of the rounded numbers in the file, so a restart that reads the file gets equal sums.
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
        # A crash may leave only some of the window's charges on disk. `_recovered` makes these charges `lost`.
        self._file.append(*map(_row, charges))
        self._add(charges)

    def heartbeat(self, *, batch: int, step: int, devices: float, seconds: float) -> None:
        """Record that the run still holds all `devices`, `seconds` after the last charge."""
        self._file.append({"heartbeat": round(seconds, 6), "devices": devices, "batch": batch, "step": step})

    def sync(self) -> None:
        """Write every row to disk (fsync) before returning."""
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
        """True if the training of batch number `batches` - 1 is charged; a repetition is then charged as `lost`."""
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
    """The charges in the rows of a file. An incomplete last window and a last heartbeat become `lost`."""
    charges = []
    complete = 0
    heartbeat: Charge | None = None
    incarnation = ""
    for number, row in enumerate(rows, 2):
        charge = _charge(f"{path} line {number}", row, incarnation)
        if "heartbeat" in row:
            heartbeat = charge
            continue
        # This charge covers the time of all earlier heartbeats.
        heartbeat = None
        incarnation = charge.incarnation
        charges.append(charge)
        # A charge of the trainer, or a single charge of all devices, is the last of a window.
        if charge.role not in ("engine", "teacher", "validation", "evaluation"):
            complete = len(charges)
    charges[complete:] = [dataclasses.replace(c, role="lost", phase="crash") for c in charges[complete:]]
    if heartbeat is not None:
        charges.append(heartbeat)
    return charges


def _charge(location: str, row: dict[str, Any], incarnation: str) -> Charge:
    """A row as a charge. A heartbeat becomes a charge of role `lost` to the attempt `incarnation`."""
    if "heartbeat" in row:
        row |= {"seconds": row["heartbeat"], "role": "lost", "phase": "crash", "incarnation": incarnation}
    try:
        return msgspec.convert(row, Charge)
    except msgspec.ValidationError as error:
        raise ValueError(f"{location}: the row is neither a charge nor a heartbeat: {error}") from None

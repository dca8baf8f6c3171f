"""The ledger: what the run held, in device-hours per role and batch.

It charges what was held, not what was busy: devices x wall time, idle time included, from the moment the
processes exist. On GPUs a device is a GPU and the unit is GPU-hours; without GPUs a device is one trainer
or engine process and the unit says so: device-hours. The forecast's axis is the sum of the roles `trainer` and
`engine`; what passes until the first weights of an attempt are served (`startup`), validation, and work that a
crash threw away (`lost`) are roles of their own. (Khatri et al. 2025 count steps x a constant per setup.)

Every charge belongs to a batch of the journal, and a restart trains the journal's batches again with the rollouts
that are in it. So the charges of a batch stay with it: a crash takes none of them off the axis. Work done twice
counts once: the first time stays on the axis, the repetition is `lost`. The time between the last charge and a crash
is `lost` too, up to the last heartbeat row in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl, rewrite
from megatron_scalerl.types import ComputeUnit

Role = Literal["startup", "trainer", "engine", "validation", "lost"]
Phase = Literal["startup", "produce", "train", "validate", "replay", "crash"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """Devices that a role held for some time."""

    batch: int
    """Batches of the run's lineage once the window was over: the window belongs to batch number `batch` - 1."""
    step: int
    """The optimizer step during which they were held."""
    phase: Phase
    """`produce`: until the batch was composed; `train`: its step and weight update; `validate`: a validation that
    nothing else ran beside; `startup`, `replay`: see the module; `crash`: the window that a crash cut off."""
    role: Role
    devices: float
    """Number of devices; a fraction where a window was split between roles."""
    seconds: float
    """Wall time."""
    incarnation: str
    """The attempt in which it was charged."""

    @property
    def hours(self) -> float:
        """Device-hours."""
        return self.devices * self.seconds / 3600


class Ledger:
    """RUN/ledger.jsonl: a head line with the unit, then one charge a line, and heartbeats since the last charge.

    The charges of one window are written together and end with the trainer's.
    """

    def __init__(self, path: str | Path, unit: ComputeUnit, *, incarnation: str) -> None:
        """Open or create, and charge what a crash left uncharged. Raises ValueError for a file in another unit."""
        self.path = Path(path)
        self.unit = unit
        self._incarnation = incarnation
        self._charges = _recovered(_rows(self.path, unit))
        self._trained = max((c.batch for c in self._charges if c.role == "trainer" and c.phase == "train"), default=0)
        rewrite(self.path, [{"unit": unit}, *map(_row, self._charges)])
        self._file = JsonlWriter(self.path)

    def charge(
        self, *, batch: int, step: int, phase: Phase, seconds: float, devices: Iterable[tuple[Role, float]]
    ) -> None:
        """Append the charges of one window of `seconds`: (role, devices), the trainer's last."""
        charges = [
            Charge(
                batch=batch,
                step=step,
                phase=phase,
                role=role,
                devices=count,
                seconds=seconds,
                incarnation=self._incarnation,
            )
            for role, count in devices
        ]
        self._charges += charges
        if phase == "train":
            self._trained = max(self._trained, batch)
        self._file.append(*map(_row, charges))

    def heartbeat(self, *, batch: int, step: int, devices: float, seconds: float) -> None:
        """All devices are still held, `seconds` after the last charge."""
        self._file.append({"heartbeat": round(seconds, 6), "devices": devices, "batch": batch, "step": step})

    def sync(self) -> None:
        """Return when every row is on the disk."""
        self._file.sync()

    def hours(self, *roles: Role) -> float:
        """Device-hours of these roles so far; of all of them if none is named."""
        return sum(c.hours for c in self._charges if not roles or c.role in roles)

    @property
    def axis(self) -> float:
        """The forecast's compute axis: trainer and engine, without validation and lost work."""
        return self.hours("trainer", "engine")

    def axis_at(self, batches: int) -> float:
        """The axis as it was when the first `batches` batches of the lineage were done (device-hours)."""
        return sum(c.hours for c in self._charges if c.role in ("trainer", "engine") and c.batch <= batches)

    def is_charged(self, batches: int) -> bool:
        """True if the training of batch number `batches` - 1 was charged: training it again is a repetition."""
        return batches <= self._trained

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _row(charge: Charge) -> dict[str, Any]:
    return {
        "batch": charge.batch,
        "step": charge.step,
        "phase": charge.phase,
        "role": charge.role,
        "devices": round(charge.devices, 6),
        "seconds": round(charge.seconds, 6),
        "hours": charge.hours,
        "incarnation": charge.incarnation,
    }


def _rows(path: Path, unit: ComputeUnit) -> list[dict[str, Any]]:
    """The rows behind the head line. Raises ValueError where the head names another unit."""
    rows = read_jsonl(path)
    if rows and rows[0].get("unit") != unit:
        raise ValueError(f"{path}: expected unit {unit}, found {rows[0].get('unit')}")
    return rows[1:]


def _recovered(rows: Iterable[dict[str, Any]]) -> list[Charge]:
    """The charges of a file, with what a crash left: a window without its end and the last heartbeat are `lost`."""
    charges: list[Charge] = []
    whole = 0
    heartbeat: dict[str, Any] | None = None
    for row in rows:
        if "heartbeat" in row:
            heartbeat = row
            continue
        heartbeat = None
        charges.append(_charge(row))
        # the first version of this file wrote the trainer's charge first, and no batch
        if charges[-1].role not in ("engine", "validation") or "batch" not in row:
            whole = len(charges)
    charges[whole:] = [dataclasses.replace(c, role="lost", phase="crash") for c in charges[whole:]]
    if heartbeat is not None:
        charges.append(
            Charge(
                batch=heartbeat["batch"],
                step=heartbeat["step"],
                phase="crash",
                role="lost",
                devices=heartbeat["devices"],
                seconds=heartbeat["heartbeat"],
                incarnation=charges[-1].incarnation if charges else "",
            )
        )
    return charges


def _charge(row: dict[str, Any]) -> Charge:
    """A row as a charge; runs of the first version tell no batch and no phase: each step was one batch."""
    phase = "startup" if row["role"] == "startup" else "crash" if row["role"] == "lost" else "train"
    fields = {"batch": row["step"], "phase": phase} | row
    return Charge(**{f.name: fields[f.name] for f in dataclasses.fields(Charge)})

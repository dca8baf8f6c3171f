"""The ledger: what the run held, in device-hours per role and step.

It charges what was held, not what was busy: devices x wall time, idle time included, from the moment the
processes exist. On GPUs a device is a GPU and the unit is GPU-hours; without GPUs a device is one trainer
or engine process and the unit says so: device-hours. The forecast's axis is the sum of the roles
`trainer` and `engine` in the lineage of the checkpoint that the run goes on from; the time until the first
weights are served (`startup`), validation, and what a crash made void (`lost`) are roles of their own.

While a validation runs, the engines' time is split between `validation` and `engine` by the tokens that
each generated in that window; the trainer's time goes to `validation` while it stands still because a
validation pins the version. (Khatri et al. 2025 count steps x a constant per setup.)
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["startup", "trainer", "engine", "validation", "lost"]
Unit = Literal["gpu_hours", "device_hours"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """Devices that a role held for some time."""

    step: int
    """The optimiser step during which they were held."""
    role: Role
    devices: float
    """Number of devices; a fraction where a window was split between roles."""
    seconds: float
    """Wall time."""
    incarnation: str
    """The life of the run in which it was charged."""

    @property
    def hours(self) -> float:
        """Device-hours."""
        return self.devices * self.seconds / 3600


class Ledger:
    """RUN/ledger.jsonl: a head line with the unit, then one charge a line."""

    def __init__(self, path: str | Path, unit: Unit, *, incarnation: str) -> None:
        """Open or create. Raises ValueError where the file was kept in another unit."""
        self.path = Path(path)
        self.unit = unit
        self._incarnation = incarnation
        self._charges: list[Charge] = []
        if self.path.exists():
            self._charges = _read(self.path, unit)
        else:
            self.path.write_text(json.dumps({"unit": unit}) + "\n")
        self._file = open(self.path, "a", encoding="utf8")  # noqa: SIM115

    def charge(self, step: int, role: Role, devices: float, seconds: float) -> None:
        """Append one charge."""
        charge = Charge(step=step, role=role, devices=devices, seconds=seconds, incarnation=self._incarnation)
        self._charges.append(charge)
        self._file.write(_line(charge))
        self._file.flush()

    def hours(self, *roles: Role) -> float:
        """Device-hours of these roles so far; of all of them if none is named."""
        return sum(c.hours for c in self._charges if not roles or c.role in roles)

    @property
    def axis(self) -> float:
        """The forecast's compute axis: trainer and engine, without validation and lost work."""
        return self.hours("trainer", "engine")

    def roll_back(self, step: int) -> None:
        """A restart goes on from the checkpoint of `step`: what was charged for later steps is lost."""
        self._charges = [c if c.step <= step else dataclasses.replace(c, role="lost") for c in self._charges]
        self._file.close()
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w", encoding="utf8") as file:
            file.write(json.dumps({"unit": self.unit}) + "\n")
            file.writelines(_line(c) for c in self._charges)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._file = open(self.path, "a", encoding="utf8")  # noqa: SIM115

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(charge: Charge) -> str:
    row = {
        "step": charge.step,
        "role": charge.role,
        "devices": round(charge.devices, 6),
        "seconds": round(charge.seconds, 6),
        "hours": charge.hours,
        "incarnation": charge.incarnation,
    }
    return json.dumps(row) + "\n"


def _read(path: Path, unit: Unit) -> list[Charge]:
    charges: list[Charge] = []
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path} line {number}: expected a JSON object, found {line[:40]!r}") from None
        if number == 1:
            if row.get("unit") != unit:
                raise ValueError(f"{path}: expected unit {unit}, found {row.get('unit')}")
            continue
        charges.append(Charge(**{f.name: row[f.name] for f in dataclasses.fields(Charge)}))
    return charges

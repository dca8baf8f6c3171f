"""What a part reports: one finding per check, written at once, so that a part that is killed keeps its findings."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

Status = Literal["passed", "failed", "missed", "measured", "not run"]
"""`failed` is a defect; `missed` is a performance target or a planner prediction that was not met."""
_DETAIL_CHARACTERS = 400
_NAMED = 6
"""Quantities in a finding's detail: those nearest to their bounds."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. Produced by `Recorder`, or by the runner for a check that was not reached."""

    check: str
    """PART/NAME, as declared in `check_gpu.table`."""
    status: Status
    """`measured` has a value and no bound."""
    value: float | None = None
    unit: str = ""
    target: float | None = None
    """Upper bound of `value`, in `unit`; a lower bound if `at_least`."""
    at_least: bool = False
    detail: str = ""
    """One line: what was found, or why there is no result."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, JSON types only."""

    def bound(self) -> str:
        """The target as text; "" without one."""
        return "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:.4g}"

    def figure(self) -> str:
        """The value with its unit; "" without one."""
        return "" if self.value is None else f"{self.value:.4g} {self.unit}".strip()


def finite(value: Any) -> Any:
    """`value` with None for every nonfinite number and lists for tuples, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Recorder:
    """Appends the findings of one part to a JSON Lines file."""

    def __init__(self, part: str, path: Path) -> None:
        self.part = part
        self._path = path

    def measured(
        self,
        check: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        goal: bool = False,
        detail: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a figure in `unit`. With a bound it passes or fails; a nonfinite value always fails.

        goal: the bound is a target, whose status is missed rather than failed.
        """
        assert at_most is None or at_least is None, "one bound"
        beyond: Status = "missed" if goal else "failed"
        status: Status = "measured"
        if at_most is not None:
            status = "passed" if value <= at_most else beyond
        if at_least is not None:
            status = "passed" if value >= at_least else beyond
        if not math.isfinite(value):
            status, detail = "failed", f"expected a finite number, found {value}. {detail}".strip()
        self._add(
            Finding(
                check=f"{self.part}/{check}",
                status=status,
                value=value if math.isfinite(value) else None,
                unit=unit,
                target=at_least if at_most is None else at_most,
                at_least=at_least is not None,
                detail=detail,
                data=data or {},
            )
        )

    def holds(self, check: str, ok: bool, detail: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Record a check without a figure."""
        status: Status = "passed" if ok else "failed"
        self._add(Finding(check=f"{self.part}/{check}", status=status, detail=detail, data=data or {}))

    def faultless(
        self, check: str, faults: Sequence[object], detail: str = "", data: Mapping[str, Any] | None = None
    ) -> None:
        """Record a check that passes, with `detail`, if there are no faults, and fails with the first three."""
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        self.holds(check, not faults, "; ".join(map(str, faults[:3])) + more if faults else detail, data)

    def compared(self, check: str, distances: Sequence[Distance], data: Mapping[str, Any] | None = None) -> None:
        """Record the largest distance relative to its bound; the check fails above 1."""
        nearest = sorted(distances, key=lambda d: -d.of_bound)
        found = {d.name: [d.found if math.isfinite(d.found) else str(d.found), d.bound] for d in distances}
        self.measured(
            check,
            nearest[0].of_bound,
            "of tolerance",
            at_most=1.0,
            detail=", ".join(f"{d.name} {d.found:.2g} (<= {d.bound:.2g})" for d in nearest[:_NAMED]),
            data={"found_and_bound": found} | dict(data or {}),
        )

    def not_run(self, check: str, why: str) -> None:
        """Record a check that cannot run here."""
        self._add(Finding(check=f"{self.part}/{check}", status="not run", detail=why))

    @contextlib.contextmanager
    def guarded(self, check: str) -> Iterator[None]:
        """Fails `check` on an exception inside; the traceback goes to the log and the part continues."""
        try:
            yield
        except Exception as error:  # counted: a failed finding
            traceback.print_exc()
            self.holds(check, False, f"{type(error).__name__}: {error}")

    def _add(self, finding: Finding) -> None:
        line = asdict(finding) | {"detail": " ".join(finding.detail.split())[:_DETAIL_CHARACTERS]}
        line["data"] = finite(line["data"])
        with open(self._path, "a", encoding="utf8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        print(f"[{time.strftime('%H:%M:%S')}] {line['check']}: {line['status']} {line['detail']}", file=sys.stderr)


def read_findings(path: Path) -> list[Finding]:
    """The findings in a file, whose last line may be truncated; a failure wins over other findings of its check."""
    found: dict[str, Finding] = {}
    if path.exists():
        for line in path.read_text(encoding="utf8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                finding = Finding(**json.loads(line))
                earlier = found.get(finding.check)
                if earlier is None or earlier.status != "failed":
                    found[finding.check] = finding
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far one quantity of a check is from its reference."""

    name: str
    found: float
    bound: float
    """In the unit of `found`."""

    @property
    def of_bound(self) -> float:
        """`found` over `bound`; infinite if it is not finite."""
        return self.found / self.bound if math.isfinite(self.found) else math.inf


def relative(name: str, found: ArrayLike, expected: ArrayLike, bound: float) -> Distance:
    """L2 norm of the difference over the L2 norm of `expected`, in fp64."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == b.shape, (name, a.shape, b.shape)
    return Distance(name=name, found=float(np.linalg.norm(a - b) / np.linalg.norm(b)), bound=bound)

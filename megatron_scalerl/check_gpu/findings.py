"""What a part reports: one finding per check, written at once, so that a part that is cut off keeps what it found."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "missed", "measured", "not run"]
"""`failed` is a fault; `missed` is a target of speed or of the planner that was not reached."""
_DETAIL_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. Produced by `Recorder`, or by the runner for a check that was not reached."""

    check: str
    """PART/NAME, as `check_gpu.table` declares it."""
    status: Status
    """`measured` has a value and no bound."""
    value: float | None = None
    unit: str = ""
    target: float | None = None
    """In `unit`; the most that `value` may be, or with `at_least` the least."""
    at_least: bool = False
    detail: str = ""
    """One line: what was found, or why there is nothing."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, JSON types only."""

    def bound(self) -> str:
        """The target as text, "" without one."""
        return "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:.4g}"


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite, and lists for tuples, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Recorder:
    """Appends findings of one part to a JSON lines file."""

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
        """A figure in `unit`; with a bound it passes or fails, and what is not finite fails.

        `goal`: the bound is a target, which is missed and not failed.
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
        """A check that has no figure."""
        status: Status = "passed" if ok else "failed"
        self._add(Finding(check=f"{self.part}/{check}", status=status, detail=detail, data=data or {}))

    def not_run(self, check: str, why: str) -> None:
        """A check that cannot run here."""
        self._add(Finding(check=f"{self.part}/{check}", status="not run", detail=why))

    @contextlib.contextmanager
    def guarded(self, check: str) -> Iterator[None]:
        """An exception inside becomes the failure of `check`; its traceback goes to the log, the part goes on."""
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
    """The findings of a file, whose last line may be torn; of a check that reported twice the worse one."""
    found: dict[str, Finding] = {}
    if path.exists():
        for line in path.read_text(encoding="utf8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                finding = Finding(**json.loads(line))
                earlier = found.get(finding.check)
                if earlier is None or earlier.status != "failed":
                    found[finding.check] = finding
    return list(found.values())

"""How far results are apart, judged together: a check of several quantities passes if each is within its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_scalerl.check_gpu.findings import Recorder

_NAMED = 6
"""Quantities in a finding's one line, those nearest to their bounds."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """One quantity of a check."""

    name: str
    found: float
    bound: float
    """In the unit of `found`."""

    @property
    def of_bound(self) -> float:
        """`found` over `bound`; infinite where it is not a number."""
        return self.found / self.bound if math.isfinite(self.found) else math.inf


def relative(name: str, found: ArrayLike, expected: ArrayLike, bound: float) -> Distance:
    """L2 distance over the L2 norm of `expected`, in fp64."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == b.shape, (name, a.shape, b.shape)
    return Distance(name=name, found=float(np.linalg.norm(a - b) / np.linalg.norm(b)), bound=bound)


def judge(record: Recorder, check: str, distances: Sequence[Distance], data: Mapping[str, Any] | None = None) -> None:
    """Report the largest share of a bound that is used up; more than 1 fails."""
    nearest = sorted(distances, key=lambda d: -d.of_bound)
    found = {d.name: [d.found if math.isfinite(d.found) else str(d.found), d.bound] for d in distances}
    record.measured(
        check,
        nearest[0].of_bound,
        "of tolerance",
        at_most=1.0,
        detail=", ".join(f"{d.name} {d.found:.2g} (<= {d.bound:.2g})" for d in nearest[:_NAMED]),
        data={"found_and_bound": found} | dict(data or {}),
    )

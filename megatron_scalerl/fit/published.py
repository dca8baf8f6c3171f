"""The curves of Khatri et al. (2025, arXiv 2510.13786) that ship with the package: see data/README.md."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_scalerl.fit.sigmoid import Array

DATA = Path(__file__).parent / "data"
PROMPTS, GENERATIONS = 1000, 16
"""Validation size of every published point: mean@16 on 1,000 held-out prompts."""


@dataclass(frozen=True, kw_only=True)
class PublishedSeries:
    """One curve of one figure."""

    run: str
    """The physical run; several series can show one run."""
    figure: str
    """The figure's name in points.csv."""
    series: str
    """The curve's name in the legend."""
    compute: Array = field(repr=False)
    """[n] GPU-hours, ascending."""
    pass_rate: Array = field(repr=False)
    """[n] mean@16."""
    fitted: np.ndarray = field(repr=False)
    """[n] True where the authors fitted, False where they predicted."""
    initial: float
    """R_0, recovered from the drawn curve."""
    asymptote: float
    """A in the legend."""
    exponent: float
    """B in the legend."""
    midpoint: float
    """C_mid in GPU-hours: as published, else recovered from the drawn curve."""

    @property
    def name(self) -> str:
        """figure/series; unique."""
        return f"{self.figure}/{self.series}"


def published_series() -> list[PublishedSeries]:
    """Every digitized series, in the order of the identity table (data/runs.csv)."""
    points: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in _rows("points.csv"):
        points.setdefault((row["figure"], row["series"]), []).append(row)
    legends = {(row["figure"], row["series"]): row for row in _rows("fit_parameters.csv")}
    identity = [(row["run"], row["figure"], row["series"]) for row in _rows("runs.csv")]
    by_run = {run: legends[figure, series] for run, figure, series in identity if (figure, series) in legends}
    out = []
    for run, figure, series in identity:
        legend = legends.get((figure, series), by_run[run])
        rows = sorted(points[figure, series], key=lambda row: float(row["gpu_hours"]))
        out.append(
            PublishedSeries(
                run=run,
                figure=figure,
                series=series,
                compute=np.array([float(row["gpu_hours"]) for row in rows]),
                pass_rate=np.array([float(row["pass_rate"]) for row in rows]),
                fitted=np.array([row["phase"] == "train" for row in rows]),
                initial=float(legend["R_0"]),
                asymptote=float(legend["A"]),
                exponent=float(legend["B"]),
                midpoint=float(legend["C_mid_published"] or legend["C_mid_drawn"]),
            )
        )
    return out


def published_run(name: str) -> PublishedSeries:
    """The series called `name` (figure/series), or the longest series of the run called `name`.

    Raises ValueError for an unknown name.
    """
    found = [s for s in published_series() if name in (s.name, s.run)]
    if not found:
        raise ValueError(f"expected one of {sorted({s.run for s in published_series()})}, found {name!r}")
    return max(found, key=lambda s: len(s.compute))


def _rows(name: str) -> list[dict[str, str]]:
    with open(DATA / name, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))

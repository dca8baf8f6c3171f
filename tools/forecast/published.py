"""The curves of Khatri et al. (2025, arXiv 2510.13786): examples/curves/README.md says where they come from."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_scalerl.fit.sigmoid import Array

CURVES = Path(__file__).resolve().parents[2] / "examples" / "curves"
PROMPTS, GENERATIONS = 1000, 16
"""Validation size of every published point: mean@16 on 1,000 held-out prompts."""


@dataclass(frozen=True, kw_only=True)
class PublishedSeries:
    """One curve of one figure."""

    run: str
    """The physical run; several series can show one run."""
    name: str
    """figure/series; unique."""
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


def published_series():
    """Every digitized series, in the order of runs.csv; one without a legend has that of the same run."""
    points, legends = _by_series("points.csv"), _by_series("fit_parameters.csv")
    identity = [(row["run"], key) for key, [row] in _by_series("runs.csv").items()]
    by_run = {run: legends[key][0] for run, key in identity if key in legends}
    out = []
    for run, key in identity:
        legend = legends[key][0] if key in legends else by_run[run]
        rows = sorted(points[key], key=lambda row: float(row["gpu_hours"]))
        out.append(
            PublishedSeries(
                run=run,
                name=key,
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


def published_run(name):
    """The series called `name`, or the longest series of the run called `name`."""
    return max((s for s in published_series() if name in (s.name, s.run)), key=lambda s: len(s.compute))


def _by_series(file):
    """figure/series -> its rows, in the file's order."""
    out = {}
    with open(CURVES / file, encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            out.setdefault(f"{row['figure']}/{row['series']}", []).append(row)
    return out

"""The other figures of a report: the efficiency transform of a comparison, and the backtest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_scalerl.fit.backtest import MARGIN, Backtest
from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.formatting import short_number, unit_label
from megatron_scalerl.fit.plot import COLORS, INK, MARKERS, new_figure, plain_ticks, save
from megatron_scalerl.fit.sigmoid import efficiency_transform


def plot_efficiency(path: str | Path, comparison: Comparison) -> Path:
    """Plot F(R) = C^B against C on log axes for the runs that share a ceiling; the slope is B.

    Runs of one recipe have one color. Points at or above the common A have no transform and are not shown; the legend
    states their number.
    """
    figure, axes = new_figure()
    runs = [(index, run) for index, arm in enumerate(comparison.arms) for run in arm.refits]
    for index, run in runs:
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        log_f = efficiency_transform(run.pass_rate, **run.parameters)
        shown = np.isfinite(log_f)
        excluded = "" if shown.all() else f", {np.count_nonzero(~shown)} points above A"
        ends = np.array([run.compute.min(), run.compute.max()])
        label = f"{run.name}: B = {run.exponent:.2f}{excluded}"
        axes.plot(ends, np.exp(run.exponent * np.log(ends)), color=color, linewidth=1.8)
        style: dict[str, Any] = {"color": color, "markersize": 4.5, "linestyle": "none", "label": label}
        axes.plot(run.compute[shown], np.exp(log_f[shown]), marker, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes)
    axes.set_xlabel(unit_label(comparison.arms[0].fits[0].unit))
    axes.set_ylabel("F(R) = C$^B$")
    axes.set_title(f"Efficiency at A = {comparison.fixed_asymptote:.3f}: the steeper, the better", loc="left")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return save(figure, path)


def plot_backtest(path: str | Path, test: Backtest, *, unit: str = "gpu_hours") -> Path:
    """Plot the forecast of the last point against the compute up to which the run was fitted."""
    figure, axes = new_figure()
    x = np.array([point.compute for point in test.points])
    y, lo, hi = (np.array([getattr(point, key) for point in test.points]) for key in ("forecast", "lo", "hi"))
    axes.fill_between(x, lo, hi, color=COLORS[0], alpha=0.16, linewidth=0, label="90 % interval")
    axes.plot(x, y, "o-", color=COLORS[0], markersize=4.5, label="forecast of the last point")
    low, high = test.final_pass_rate - MARGIN, test.final_pass_rate + MARGIN
    axes.axhspan(low, high, color=COLORS[2], alpha=0.15, linewidth=0, label=f"measured, ±{MARGIN:g}")
    axes.axhline(test.final_pass_rate, color=COLORS[2], linewidth=1.2)
    if test.settled_from is not None:
        axes.axvline(test.settled_from, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), label="settled from here")
    axes.set_xscale("log")
    plain_ticks(axes)
    axes.set_xlabel(f"{unit_label(unit)}, fitted up to")
    axes.set_ylabel(f"forecast for {short_number(test.final_compute)}")
    axes.set_title(f"{test.name}: how the forecast of the last point moved", loc="left")
    axes.legend(loc="best", frameon=False, fontsize=9)
    return save(figure, path)

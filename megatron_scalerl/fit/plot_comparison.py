"""Figures of a comparison: every recipe's numbers with their intervals, and the curves of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_scalerl.fit.compare import ComparedArm, Comparison
from megatron_scalerl.fit.decide import Estimate
from megatron_scalerl.fit.formatting import unit_label, unit_name
from megatron_scalerl.fit.plot import COLORS, INK, plain_ticks, save, style
from megatron_scalerl.fit.quantities import compute_to
from megatron_scalerl.fit.result import FitResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_INCHES = 0.34
"""Height of one recipe."""
PANELS_A_ROW = 4
"""Small axes side by side in the figure of the curves."""
_OWN, _OTHER = COLORS[0], "#9a9a9a"
_Panel = tuple[str, bool, Callable[[ComparedArm], Estimate | None], Callable[[FitResult], float]]


def plot_comparison(path: str | Path, comparison: Comparison) -> Path:
    """Plot A, B at equal A and the compute to one pass rate, a row per recipe: runs, mean and 90 % interval.

    Raises ValueError for a suffix other than .png and .svg, OSError.
    """
    reach = compute_to(comparison.pass_rate).value
    unit = unit_name(comparison.arms[0].fits[0].unit)
    panels: list[_Panel] = [
        ("A", False, lambda arm: arm.asymptote, lambda fit: fit.asymptote),
        (f"B at A = {comparison.fixed_asymptote:.3f}", False, lambda arm: arm.fixed_exponent, lambda f: f.exponent),
        (f"{unit} to {comparison.pass_rate:.3f}", True, lambda arm: arm.to_reach, reach),
    ]
    figure = _figure((10.0, 1.5 + ROW_INCHES * len(comparison.arms)))
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for number, (axes, (title, log, mean, value)) in enumerate(zip(all_axes, panels)):
        style(axes)
        for row, arm in enumerate(comparison.arms):
            runs = arm.fits if number == 0 or not arm.refits else arm.refits
            _row(axes, row, mean(arm), [] if mean(arm) is None else [value(fit) for fit in runs])
        first = mean(comparison.arms[0])
        if first is not None and math.isfinite(first.value):
            axes.axvline(first.value, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        if log:
            axes.set_xscale("log")
            plain_ticks(axes)
        axes.set_title(title, loc="left", fontsize=10)
    all_axes[0].set_yticks(range(len(comparison.arms)), [f"{arm.name} ({arm.runs})" for arm in comparison.arms])
    all_axes[0].invert_yaxis()
    figure.suptitle("Mean over the runs with its 90 % interval; dots are runs", x=0.01, ha="left", fontsize=11)
    return save(figure, path)


def plot_curves(path: str | Path, comparison: Comparison) -> Path:
    """Plot the points and the curves of every recipe's runs over the curves of its reference, one panel each.

    Raises ValueError for a suffix other than .png and .svg, OSError.
    """
    arms = comparison.arms
    columns = min(PANELS_A_ROW, len(arms))
    rows = -(-len(arms) // columns)
    figure = _figure((2.9 * columns + 0.4, 2.3 * rows + 0.7))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, arm in zip(grid.flat, arms):
        style(axes)
        if arm.reference is not None:
            for fit in comparison.arm(arm.reference).fits:
                _curve(axes, fit, _OTHER, points=False)
        for fit in arm.fits:
            _curve(axes, fit, _OWN, points=True)
        axes.set_xscale("log")
        plain_ticks(axes)
        axes.tick_params(labelsize=8)
        axes.set_title(arm.name, loc="left", fontsize=9)
    for axes in grid.flat[len(arms) :]:
        axes.set_axis_off()
    figure.supxlabel(unit_label(arms[0].fits[0].unit), fontsize=10)
    figure.supylabel("validation pass rate", fontsize=10)
    figure.suptitle("Points and curves of each run; gray: the reference's curves", x=0.01, ha="left", fontsize=11)
    return save(figure, path)


def _figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _row(axes: "Axes", row: int, mean: Estimate | None, runs: Sequence[float]) -> None:
    """Runs as dots, the mean as a diamond on its interval; what is infinite is left out."""
    shown = [value for value in runs if math.isfinite(value)]
    axes.plot(shown, [row] * len(shown), "o", color=_OTHER, markersize=4, linestyle="none", zorder=2)
    if mean is None or not math.isfinite(mean.value):
        axes.annotate(
            "another ceiling" if mean is None else "never",
            (0.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=INK,
        )
        return
    if math.isfinite(mean.lo) and math.isfinite(mean.hi):
        axes.plot([mean.lo, mean.hi], [row, row], color=_OWN, linewidth=2.0, solid_capstyle="butt", zorder=1)
    axes.plot([mean.value], [row], "D", color=_OWN, markersize=5, zorder=3)


def _curve(axes: "Axes", fit: FitResult, color: str, *, points: bool) -> None:
    compute = np.geomspace(float(fit.compute.min()) * 0.8, float(fit.compute.max()), 80)
    axes.plot(compute, fit.curve(compute), color=color, linewidth=1.2, zorder=2 if points else 1)
    if points:
        axes.plot(fit.compute, fit.pass_rate, "o", color=color, markersize=2.2, alpha=0.6, linestyle="none")

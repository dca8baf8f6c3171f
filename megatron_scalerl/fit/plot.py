"""Figures of a forecast: fitted points filled, unseen points hollow, curve, 90 % band, asymptote, log compute.

Drawn with matplotlib's object interface: no display and no global state are needed. The colors are Okabe and Ito's,
which color-blind readers can distinguish; every run has its own marker as well.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_scalerl.fit.formatting import short_number, shortened, unit_label
from megatron_scalerl.fit.result import LEVEL, FitResult
from megatron_scalerl.fit.sigmoid import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#222222"
GRID_INK = "#d9d9d9"
SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 200
SOLID_AND_DASHED = (
    "Solid: the fitted sigmoid. Dashed: the forecast, which starts at the run's present level and is the median of "
    "all sigmoids that agree with the points."
)
"""The note that explains the solid and the dashed line of each run in a figure."""
Points = tuple[Sequence[float] | Array, Sequence[float] | Array]
"""Points as (compute [n], pass rate [n])."""


def plot_forecast(
    path: str | Path,
    fits: FitResult | Sequence[FitResult],
    *,
    unseen: Mapping[str, Points] | None = None,
    until: float | None = None,
    title: str | None = None,
    target: float | None = None,
) -> Path:
    """Write one figure with every run's points, curve, 90 % band and asymptote; PNG or SVG by the suffix.

    unseen: by run name, points that were not fitted; drawn hollow.
    until:  compute up to which the curves are drawn; default: twice the largest fitted compute.
    target: a pass rate to mark with a horizontal line.
    Raises ValueError for any suffix but .png and .svg, OSError if the file cannot be written.
    """
    if isinstance(fits, FitResult):
        fits = [fits]
    unseen = unseen or {}
    until = until or 2.0 * max(float(run.compute.max()) for run in fits)
    figure, axes = new_figure()
    for index, run in enumerate(fits):
        _draw_run(axes, run, index, unseen=unseen.get(run.name, ((), ())), until=until, is_single=len(fits) == 1)
    if target is not None:
        axes.axhline(target, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(f"target {target:.3f}", (0.01, target), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xscale("log")
    plain_ticks(axes)
    axes.set_xlabel(unit_label(fits[0].unit))
    axes.set_ylabel("validation pass rate")
    title = title or f"{title_of(fits)}: forecast of the validation pass rate"
    axes.set_title(textwrap.fill(shortened(title, 130), 66), loc="left", fontsize=11)
    # the legend stands below the axes, where no point is covered; its title explains solid and dashed lines
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        ncols=max(1, min(3, 105 // (max(map(len, labels)) + 7))),
        title=textwrap.fill(SOLID_AND_DASHED, 130),
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        title_fontsize=8,
    )
    return save(figure, path)


def title_of(runs: Sequence[FitResult]) -> str:
    """Text for a title: the name of a single run, or the number of several runs."""
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def new_figure() -> tuple["Figure", "Axes"]:
    """(figure, axes) in this package's style: a light grid, no box, dark gray text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    # pyplot would need a display and keep every figure, so the canvas is made without pyplot
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(True, which="major", color=GRID_INK, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=10)
    return figure, axes


def save(figure: "Figure", path: str | Path) -> Path:
    """Write `figure` as PNG or SVG, by the suffix of `path`. Raises ValueError for any suffix but .png and .svg."""
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: a figure is written as .png or .svg, not as {path.suffix!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # an SVG without a date has equal bytes for equal figures; the metadata of a PNG has no date
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _draw_run(axes: "Axes", run: FitResult, index: int, *, unseen: Points, until: float, is_single: bool) -> None:
    """Draw one run's band, curve, points and asymptote in the color and marker of `index`."""
    color = COLORS[index % len(COLORS)]
    marker = MARKERS[index % len(MARKERS)]
    hidden = "" if is_single else "_"  # a legend leaves out labels that begin with an underscore
    end = float(run.compute.max())
    past = np.geomspace(0.8 * float(run.compute.min()), end, 120)
    future = np.geomspace(end, until, 120)
    forecast = run.predict(future)
    median = [prediction.pass_rate for prediction in forecast]
    axes.plot(past, run.curve(past), color=color, linewidth=2.0, label=f"{hidden}fitted sigmoid")
    axes.plot(future, median, color=color, linewidth=2.0, linestyle=(0, (4, 1.5)), label=f"{hidden}median forecast")
    if not is_single:
        name = f"{shortened(run.name, 50)}: A = {run.asymptote:.3f}"
        axes.plot([], [], marker, linestyle="-", color=color, linewidth=2.0, markersize=4.5, label=name)
    label = f"{hidden}fitted, {run.n_points} points"
    axes.plot(run.compute, run.pass_rate, marker, color=color, markersize=4.5, label=label)
    if len(unseen[0]):
        label = f"{hidden}not fitted"
        axes.plot(*unseen, marker, color=color, markerfacecolor="white", markersize=5.5, label=label)
    axes.axhline(run.asymptote, color=color, linewidth=1.0, linestyle=(0, (6, 3)), alpha=0.8)
    if is_single:
        lower, upper = run.intervals["asymptote"]
        axes.annotate(
            f"A = {run.asymptote:.3f}  [{lower:.3f}, {upper:.3f}]",
            (0.01, run.asymptote),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=INK,
            fontsize=10,
        )
    label = f"{hidden}{LEVEL:.0%} interval of a measurement"
    lo = _smooth([prediction.lo for prediction in forecast])
    hi = _smooth([prediction.hi for prediction in forecast])
    axes.fill_between(future, lo, hi, color=color, alpha=0.16, linewidth=0, label=label)


def _smooth(edge: Sequence[float]) -> Array:
    """Moving average over five values, to reduce the noise that random draws leave in the ends of intervals."""
    return np.convolve(np.pad(edge, 2, mode="edge"), np.full(5, 0.2), mode="valid").astype(float)


def plain_ticks(axes: "Axes") -> None:
    """Label the compute axis at 1, 2 and 5 of every decade, with numbers as `short_number` writes them."""
    from matplotlib.ticker import LogLocator

    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.xaxis.set_minor_formatter("")

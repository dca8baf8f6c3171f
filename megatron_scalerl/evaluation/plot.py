"""The figure of a thinking-budget sweep: pass rate against mean tokens, one series for each file."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from megatron_scalerl.evaluation.budgets import Saturation
from megatron_scalerl.evaluation.summaries import FileSummary
from megatron_scalerl.fit.plot import COLORS, INK, MARKERS, new_figure, plain_ticks, save
from megatron_scalerl.processes.logs import printable


def plot_budgets(
    path: Path, summaries: Sequence[FileSummary], saturations: Mapping[str, Saturation], *, title: str
) -> Path:
    """Write the figure; PNG or SVG by the suffix.

    A dashed line marks the budget at which more thinking stops paying, if the rule decides. Raises ValueError for
    another suffix, OSError if the file cannot be written.
    """
    figure, axes = new_figure()
    files = dict.fromkeys(summary.file for summary in summaries)
    for file, color, marker in zip(files, cycle(COLORS), cycle(MARKERS)):
        points = sorted((s for s in summaries if s.file == file), key=lambda s: s.budget or 0)
        tokens = [s.mean_tokens for s in points]
        rates = [s.mean_at_k.value for s in points]
        below = [s.mean_at_k.value - s.mean_at_k.low for s in points]
        above = [s.mean_at_k.high - s.mean_at_k.value for s in points]
        stops_at = None
        if file in saturations:
            stops_at = saturations[file].stops_at
        # matplotlib reads $ as mathematics, and leaves a label that begins with _ out of the legend.
        label = printable(file).replace("$", r"\$").lstrip("_")
        if stops_at is not None:
            label += f": stops paying at {stops_at:,} (dashed)"
        axes.errorbar(
            tokens,
            rates,
            yerr=[below, above],
            color=color,
            marker=marker,
            capsize=3,
            linewidth=1.5,
            label=label,
        )
        for close in _close(points):
            position = (close[0].mean_tokens, close[0].mean_at_k.value)
            text = ", ".join(f"{point.budget:,}" for point in close)
            axes.annotate(text, position, xytext=(-5, 6), ha="right", textcoords="offset points", fontsize=8)
        for point in points:
            if stops_at is not None and point.budget == stops_at:
                axes.axvline(point.mean_tokens, color=color, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    plain_ticks(axes)
    axes.set_xlabel("mean tokens of a completion (labels: thinking budget)", color=INK)
    axes.set_ylabel(f"mean@{summaries[0].k}, 95 % interval over problems")
    axes.set_title(title.replace("$", r"\$"), loc="left")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return save(figure, path)


def _close(points: Sequence[FileSummary]) -> list[list[FileSummary]]:
    """Groups of points that lie on one another and get one label: past the longest thinking nothing changes."""
    groups = [[points[0]]]
    for point in points[1:]:
        first = groups[-1][0]
        near = abs(first.mean_at_k.value - point.mean_at_k.value) < 0.02
        if near and point.mean_tokens < 1.01 * first.mean_tokens:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups

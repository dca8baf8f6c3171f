"""Forecast the final pass rate of a policy size from runs of one recipe on other sizes (`fit --across-sizes`).

The share of failures at the end of a run, 1 - level, falls as a power of the number of parameters N. The logarithm of
this share is a line in log N, from which sizes depart as a random walk does. So a forecast starts at the nearest size
and follows the slope. The slope is shrunk toward 0; with a slope of 0, the forecast of a larger size is the level of
the largest given size. A line is refused if the level of the largest other size forecasts a left-out size better. The
unit of N does not matter.

The table shows A, but no forecast uses A: a run that no longer rises determines its level well, and A poorly.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_scalerl.fit.decide import Estimate, estimate
from megatron_scalerl.fit.result import FitResult
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.tables import Table
from megatron_scalerl.record import record

FEWEST = 3
"""Fewest sizes through which a line is drawn."""
UNKNOWN = 100.0
"""Prior variance of the line's height."""
SLOPE = 0.6
"""Standard deviation of the slope's prior, whose center is 0."""
WALK = 0.2
"""Scale of the half-normal prior of the random walk's standard deviation per factor of e in N."""
WALKS = np.linspace(0.02, 1.0, 50)
"""Standard deviations of the random walk over which a forecast is averaged."""
DRAWS = 4000
"""Number of draws of a forecast."""
HIGHEST = 0.999
"""Highest level of a draw, because the logarithm of no failures would be -inf."""


@record
class Size:
    """One policy size, with the results of all runs of this size."""

    parameters: float
    """Number of parameters N, in the unit of --across-sizes."""
    asymptote: Estimate
    """Mean A of the runs."""
    level: Estimate
    """Mean pass rate at the end of the runs, without the noise of a validation."""
    log_failures: float
    """Mean of log(1 - level)."""
    log_variance: float
    """Variance of log(1 - level)."""


@record
class Ladder:
    """The line of final pass rates over policy sizes, and the line's errors for left-out sizes."""

    sizes: tuple[Size, ...]
    """The sizes, sorted by N."""
    by_line: tuple[Estimate, ...]
    """Level of each size by the line through the other sizes."""
    by_largest: tuple[float, ...]
    """For each size, the level of the largest other size, as a forecast that needs no line."""
    line_error: float
    """Mean absolute error of `by_line`."""
    largest_error: float
    """Mean absolute error of `by_largest`."""
    doubling: Estimate
    """Share of failures of a policy divided by the share of failures of a policy of half the size."""
    next_size: float | None
    """N of the size that is forecast."""
    next_level: Estimate | None
    """Forecast level of `next_size`."""

    def lines(self) -> list[Table | str]:
        """For the report: the table of sizes with forecasts from the other sizes, the mean errors, and the forecast
        of `next_size`."""
        rows = []
        for size, line, largest in zip(self.sizes, self.by_line, self.by_largest):
            level = size.level.value
            cells = [f"{size.parameters:g}", *map(_text, (size.asymptote, size.level, line))]
            rows.append((*cells, f"{level - line.value:+.3f}", f"{level - largest:+.3f}"))
        columns = ("size", "A", "level at the end", "by the other sizes", "error", "error of the largest")
        lines: list[Table | str] = [
            Table(title="Across sizes", columns=columns, rows=tuple(rows)),
            f"Mean error for a left-out size: line {self.line_error:.3f}, as the largest {self.largest_error:.3f}.",
            f"Doubling the size multiplies the share of failures by {_text(self.doubling)}.",
        ]
        if self.next_level is not None:
            lines.append(f"forecast of size {self.next_size:g}: {_text(self.next_level)} at the end of its run")
        return lines


def ladder_of(fits: Sequence[FitResult], sizes: Sequence[float], next_size: float | None) -> Ladder:
    """The line through the sizes of runs of one recipe.

    sizes: [fits] N of each run's policy; runs of one size are averaged. next_size: N to forecast. Raises ValueError
    unless there is one size per run, for fewer than three different sizes, and for a line that forecasts left-out
    sizes worse than the level of the largest other size does.
    """
    if len(sizes) != len(fits):
        listed = ", ".join(fit.name for fit in fits)
        raise ValueError(f"--across-sizes: {len(sizes)} sizes were given for {len(fits)} runs, which are {listed}")
    forecast_size = max(sizes) if next_size is None else next_size
    if min(*sizes, forecast_size) <= 0.0:
        raise ValueError("--across-sizes: every size has to be greater than 0")
    groups = defaultdict[float, list[FitResult]](list)
    for size, fit in zip(sizes, fits):
        groups[size].append(fit)
    if len(groups) < FEWEST:
        raise ValueError(f"--across-sizes: a line takes at least {FEWEST} sizes, and {len(groups)} were given")
    rungs = tuple(_size(parameters, runs) for parameters, runs in sorted(groups.items()))
    other_rungs = [[candidate for candidate in rungs if candidate is not rung] for rung in rungs]
    levels = np.array([rung.level.value for rung in rungs])
    by_line = tuple(line_at(remainder, rung.parameters)[0] for remainder, rung in zip(other_rungs, rungs))
    by_largest = tuple(remainder[-1].level.value for remainder in other_rungs)
    line_error = float(np.mean(abs(levels - [level.value for level in by_line])))
    largest_error = float(np.mean(abs(levels - by_largest)))
    if line_error > largest_error:
        errors = f"{line_error:.3f}; the level of the largest other size misses by {largest_error:.3f}"
        raise ValueError(f"--across-sizes: no line is drawn, as a line misses a left-out size by {errors}")
    forecast, doubling = line_at(rungs, forecast_size)
    return Ladder(
        sizes=rungs,
        by_line=by_line,
        by_largest=by_largest,
        line_error=line_error,
        largest_error=largest_error,
        doubling=doubling,
        next_size=next_size,
        next_level=None if next_size is None else forecast,
    )


def _size(parameters: float, fits: Sequence[FitResult]) -> Size:
    rng = np.random.default_rng(0)
    levels = []
    for fit in fits:
        mean, variance = fit.posterior.true_pass_rate(fit.compute[-1:])
        draws = mean[:, 0] + np.sqrt(variance[:, 0]) * rng.standard_normal(len(mean))
        levels.append(np.clip(draws, 0.0, HIGHEST))
    level = np.mean(levels, axis=0)
    log_failures = np.log(1.0 - level)
    return Size(
        parameters=parameters,
        # all fits have the same seed: permutations make the draws of several fits independent
        asymptote=estimate(np.mean([rng.permutation(fit.posterior.asymptote) for fit in fits], axis=0)),
        level=estimate(level),
        log_failures=float(log_failures.mean()),
        log_variance=float(log_failures.var()),
    )


def line_at(sizes: Sequence[Size], parameters: float) -> tuple[Estimate, Estimate]:
    """(forecast level of a policy with N = `parameters`, factor by which doubling N multiplies the share of
    failures).

    Gaussian process regression: the covariance of two sizes is the sum over height, slope and walk.
    """
    from scipy.special import softmax

    log_sizes = np.log([*(size.parameters for size in sizes), parameters])
    values = np.array([size.log_failures for size in sizes])
    offsets = log_sizes - log_sizes[:-1].mean()
    line = UNKNOWN + SLOPE**2 * np.outer(offsets, offsets)
    walk = np.minimum.outer(log_sizes, log_sizes) - log_sizes.min()
    # [walks, sizes, sizes]; the size to forecast comes last
    covariance = line + WALKS[:, None, None] ** 2 * walk
    inverse = np.linalg.inv(covariance[:, :-1, :-1] + np.diag([size.log_variance for size in sizes]))
    evidence = np.linalg.slogdet(inverse)[1] - values @ inverse @ values - (WALKS / WALK) ** 2
    rng = np.random.default_rng(0)
    walks = rng.choice(len(WALKS), size=DRAWS, p=softmax(evidence / 2.0))

    def posterior_draws(shared: Array, variance: Array) -> Array:
        """Posterior draws [draws] of a number. For each of `WALKS`, shared: [walks, sizes] prior covariance of the
        number with `values`; variance: [walks] prior variance of the number."""
        gain = np.einsum("wij,wj->wi", inverse, shared)
        deviation = np.sqrt(np.maximum(variance - (gain * shared).sum(axis=1), 0.0))
        return (gain @ values)[walks] + deviation[walks] * rng.standard_normal(DRAWS)

    log_failures = posterior_draws(covariance[:, -1, :-1], covariance[:, -1, -1])
    slope = posterior_draws(np.tile(SLOPE**2 * offsets[:-1], (len(WALKS), 1)), np.array(SLOPE**2))
    return estimate(np.clip(1.0 - np.exp(log_failures), 0.0, 1.0)), estimate(2.0**slope)


def _text(level: Estimate) -> str:
    return f"{level.value:.3f} [{level.lo:.3f}, {level.hi:.3f}]"

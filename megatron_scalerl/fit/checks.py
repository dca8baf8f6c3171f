"""Warnings of a fit. A warning is one sentence: the finding, the place, and the consequence for the forecast."""

import numpy as np

from megatron_scalerl.fit.formatting import short_number
from megatron_scalerl.fit.posterior import Posterior
from megatron_scalerl.fit.prior import DEFAULT_BOUNDS
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.record import record

FEW_POINTS = 8
"""Number of fitted points below which warnings and verdicts mention the number."""
STEEP = 6.0
"""Exponent B above which a warning calls the curve a step."""
SMALL_DROP = 0.005
"""Largest rise or fall of the pass rate, and largest distance below R_0, that the checks ignore."""
PLATEAU_GAIN = 0.02
"""Forecast rise of the pass rate above which a warning is given if the run's last points do not rise."""
TRUNCATION_LIMIT = 0.10
"""Share of truncated completions above which a warning is given: 10-15 % make training unstable (Khatri et al. 2025,
A.15)."""
EDGE_MASS = 0.10
"""Share of the posterior within 1 % of a bound above which a warning calls the parameter undetermined."""


def bound_warnings(posterior: Posterior, *, fixed: bool) -> list[str]:
    """Warnings for parameters whose posterior piles up at a bound. fixed: the user fixed A, so A is not checked."""
    highest = DEFAULT_BOUNDS.asymptote[1]
    room = highest - posterior.initial
    lower_bound, upper_bound = np.log(DEFAULT_BOUNDS.midpoint)
    margin = 0.01 * (upper_bound - lower_bound)
    notes = []
    if not fixed and np.mean(highest - posterior.asymptote < 0.02 * room) > EDGE_MASS:
        notes.append(f"A reaches the edge of its range ({highest:g}): the ceiling is not determined yet")
    if not fixed and np.mean(posterior.asymptote - posterior.initial < 0.02 * room) > 0.5:
        notes.append("A lies at R_0: the run shows no gain to extrapolate")
    if np.mean(posterior.log_midpoint < lower_bound + margin) > EDGE_MASS:
        notes.append("C_mid reaches the low edge of its range: the rise happened before the first fitted point")
    if np.mean(posterior.log_midpoint > upper_bound - margin) > EDGE_MASS:
        notes.append("C_mid reaches the high edge of its range: the rise has hardly begun")
    return notes


def curve_warnings(
    compute: Array, pass_rate: Array, *, exponent: float, midpoint: float, posterior: Posterior
) -> list[str]:
    """Warn about few points, a steep curve, a midpoint beyond the data and a falling tail.

    compute, pass_rate: [n] the fitted points.
    """
    notes = []
    if posterior.observations.initial_given and below_initial(pass_rate, float(posterior.initial.mean())):
        notes.append("most points lie below R_0, the pass rate before RL: training did harm, or R_0 is wrong")
    if len(compute) < FEW_POINTS:
        notes.append(f"only {len(compute)} points were fitted; {FEW_POINTS} or more are needed to trust a forecast")
    if exponent > STEEP:
        notes.append(f"B = {exponent:.1f} is above {STEEP:g}: the curve is nearly a step, so B is not determined")
    if midpoint > compute.max() or np.mean(posterior.midpoint > compute.max()) > 0.5:
        notes.append("no curvature yet: the midpoint lies beyond the fitted points, so A is not determined")
    fall = falling_tail(compute, pass_rate)
    if fall is not None:
        notes.append(
            f"falling tail: {fall}; a sigmoid cannot fall, so the run may be unstable and the forecast too high"
        )
    elif len(pass_rate) > 3 and pass_rate[-1] < 0.5 * pass_rate[-4:-1].min():
        notes.append(
            f"the last pass rate, {pass_rate[-1]:.3f}, is less than half of each of the three before: either one "
            "validation went wrong, or the run starts to collapse"
        )
    elif (gain := rising_forecast(compute, pass_rate, posterior)) is not None:
        notes.append(
            f"the last third of the points does not rise, but the forecast does, by {gain:.3f} at twice the compute: "
            "the run may have reached its plateau"
        )
    return notes


def highest_level(pass_rate: Array) -> float:
    """The level that a run has reached: the highest mean of 3 successive points, or the highest point of fewer than
    6."""
    width = 3 if len(pass_rate) >= 6 else 1
    return float(np.convolve(pass_rate, np.ones(width) / width, mode="valid").max())


def rising_forecast(compute: Array, pass_rate: Array, posterior: Posterior) -> float | None:
    """Forecast rise of the pass rate up to twice the compute, for a run whose last points do not rise.

    The last points are the last third of all points, and at least six. None if the last points rise, if the forecast
    rises by at most `PLATEAU_GAIN`, or if there are fewer than nine points.
    """
    last = pass_rate[-max(len(pass_rate) // 3, 6) :]
    half = len(last) // 2
    if len(pass_rate) < 2 * half + 3:
        return None
    mean, _ = posterior.true_pass_rate(np.array([compute[-1], 2.0 * compute[-1]]))
    gain = float(np.median(mean[:, 1] - mean[:, 0]))
    # the means of the last points' two halves are compared: the difference of two single points would be noise
    rises = float(last[half:].mean() - last[:half].mean()) > SMALL_DROP
    if rises or gain <= PLATEAU_GAIN:
        return None
    return gain


def below_initial(pass_rate: Array, initial: float) -> bool:
    """Whether most points lie more than `SMALL_DROP` below R_0: the run got worse, or R_0 was measured on another
    run."""
    return bool(np.mean(pass_rate < initial - SMALL_DROP) > 0.5)


def truncation_warnings(compute: Array, truncated: Array | None) -> list[str]:
    """Warn if a point has more than 10 % truncated completions. truncated: [n] shares; None: unknown, no warning."""
    if truncated is None or not np.any(truncated > TRUNCATION_LIMIT):
        return []
    first = int(np.flatnonzero(truncated > TRUNCATION_LIMIT)[0])
    first_compute = short_number(compute[first])
    largest_share = f"{100 * np.nanmax(truncated):.0f} %"
    return [
        f"up to {largest_share} of the completions are truncated, more than 10 % first at {first_compute} "
        "of compute: training can become unstable at 10-15 %"
    ]


@record
class Fall:
    """A fall of the pass rate after a peak."""

    compute: float
    """Compute of the peak."""
    peak: float
    """Moving average of the pass rate at the peak."""
    last: float
    """Pass rate of the last point."""
    tail: float
    """Mean of the pass rates after the peak."""

    def __str__(self) -> str:
        level = f"{self.last:.3f} at the end" if self.last <= self.tail else f"{self.tail:.3f} on average since"
        return f"the pass rate has fallen from {self.peak:.3f} at {short_number(self.compute)} to {level}"


def falling_tail(compute: Array, pass_rate: Array) -> Fall | None:
    """The fall of the pass rate after a peak; None unless the points after the peak lie clearly below the peak.

    The peak is the highest moving average over three points (an eighth of the points for a long run). The drop to the
    mean of the points after the peak counts when the drop exceeds 0.005 and 2.2 standard errors of the drop.
    The standard error is estimated from the second differences of the series. False positives: 3 % of 1,000 saturated
    synthetic runs.
    """
    half = max(len(compute) // 16, 1)
    width = 2 * half + 1
    if len(compute) < 6:
        return None
    smooth = np.convolve(pass_rate, np.ones(width) / width, mode="valid")
    top = int(np.argmax(smooth))
    # points in the peak's window are left out: peak and tail are means that must not share points
    later_rates = pass_rate[top + width :]
    if len(later_rates) < 2:
        return None
    # second differences of a straight line are 0; of noise with variance v, the variance is (1 + 4 + 1) v
    noise = float(np.std(np.diff(pass_rate, n=2)) / np.sqrt(6.0))
    peak = float(smooth[top])
    tail = float(later_rates.mean())
    if peak - tail <= max(2.2 * noise * np.sqrt(1.0 / width + 1.0 / len(later_rates)), SMALL_DROP):
        return None
    # `np.convolve` in mode "valid" begins with the first full window, so average `top` is centered on `top + half`
    return Fall(compute=float(compute[top + half]), peak=peak, last=float(pass_rate[-1]), tail=tail)

"""What the robust fit believes before it sees a run: weak, unit-free, and the same for every run.

No number here carries a compute unit: the midpoint is stated relative to the largest fitted compute, the
asymptote as a share of the room above R_0, the discrepancy as a share of sqrt(p (1 - p)). The numbers of B, C_mid,
the gain and the discrepancies are what `learning.learn()` learns from all published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Discrepancy:
    """One hypothesis on how a run strays from its sigmoid: a smooth wander around it in log compute.

    Plateaus of epochs, a data change, a slow instability: the residuals of real runs are correlated along
    the curve, and independent noise alone makes intervals far too narrow.
    """

    deviation: float
    """Standard deviation of the wander as a share of sqrt(p (1 - p)); 0 is no wander. It belongs to the run: a
    larger validation set makes it no smaller."""
    length: float
    """Correlation length in natural log of compute: 0.3 forgets about 1/e within 35 % more compute."""
    weight: float
    """Prior probability of this hypothesis, relative to the others."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Prior distribution of one run's sigmoid, unit-free."""

    log_exponent_mean: float = 0.7631
    """Mean of log B: the median over the 26 published runs (`learning`)."""
    log_exponent_sd: float = 0.322
    """Standard deviation of log B: their scaled median absolute deviation."""
    log_midpoint_mean: float = math.log(0.3533)
    """Mean of log(C_mid / largest fitted compute): their median."""
    log_midpoint_sd: float = 0.7
    """Standard deviation of log(C_mid / largest fitted compute)."""
    late_share: float = 0.1
    """Probability that the run is only at its start, where C_mid may lie far beyond the fitted compute."""
    late_mean: float = math.log(3.0)
    """Mean of log(C_mid / largest fitted compute) in that case."""
    late_sd: float = 1.2
    """Standard deviation in that case."""
    gain_alpha: float = 1.0
    """First Beta parameter of the share (A - R_0) / (1 - R_0)."""
    gain_beta: float = 2.0
    """Second Beta parameter of that share; with 1 and 2 the density falls in a line to 0 at A = 1."""
    noise_shape: float = 8.0
    """Shape of the inverse-gamma prior of the noise variance where the validation size is known."""
    noise_share: float = 0.5
    """Centre of that prior as a share of p (1 - p) / (prompts x generations): prompts differ in difficulty."""
    unknown_noise: float = 0.005
    """Centre of the noise (standard deviation, in pass rate) where the validation size is unknown."""
    unknown_noise_shape: float = 1.0
    """Shape of the inverse-gamma prior in that case: much weaker."""
    discrepancies: tuple[Discrepancy, ...] = (
        Discrepancy(deviation=0.0, length=0.5, weight=0.5),
        Discrepancy(deviation=0.01, length=0.5, weight=0.0270),
        Discrepancy(deviation=0.018, length=1.0, weight=0.3096),
        Discrepancy(deviation=0.018, length=2.0, weight=0.0986),
        Discrepancy(deviation=0.03, length=2.0, weight=0.0648),
    )
    """The hypotheses that are averaged, each by its posterior weight."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Box that the parameters stay in; a fit on its edge is warned about."""

    asymptote: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest A; the lower end is raised to R_0."""
    exponent: tuple[float, float] = (0.25, 8.0)
    """Lowest and highest B."""
    midpoint: tuple[float, float] = (3e-3, 100.0)
    """Lowest and highest C_mid, as multiples of the largest fitted compute."""


DEFAULT_PRIOR = Prior()
"""The prior of `method="robust"`."""

FLAT_PRIOR = Prior(
    log_exponent_sd=1e3,
    log_midpoint_sd=1e3,
    late_share=0.0,
    gain_alpha=1.0,
    gain_beta=1.0,
    noise_shape=0.5,
    noise_share=0.5,
    unknown_noise_shape=0.5,
    discrepancies=(Discrepancy(deviation=0.0, length=1.0, weight=1.0),),
)
"""No opinion and independent noise: how sure the paper's least squares may be, at most."""

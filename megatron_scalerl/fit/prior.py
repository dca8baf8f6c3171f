"""The prior of the robust fit: weak, unit-free, and the same for every run.

No number here has a compute unit: the midpoint is relative to the largest fitted compute, the asymptote a share of
the room above R_0, the discrepancy a share of sqrt(p (1 - p)). The values for B, C_mid, the gain and the
discrepancies are the result of `study.learning.learn()` on all published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Discrepancy:
    """One hypothesis on the model discrepancy: how a run deviates from its sigmoid, as a process in log compute.

    The residuals of real runs are correlated along the curve: plateaus of epochs, a data change, a slow instability.
    With independent noise alone the intervals are far too narrow.
    """

    deviation: float
    """Standard deviation as a share of sqrt(p (1 - p)); 0 is no discrepancy. It is a property of the run: a larger
    validation set does not reduce it."""
    length: float
    """Correlation length in natural log of compute: with 0.3 the correlation drops to 1/e over 35 % more compute."""
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
    """Probability of a late midpoint: the run is only at its start, C_mid may lie far beyond the fitted compute."""
    late_mean: float = math.log(3.0)
    """Mean of log(C_mid / largest fitted compute) for a late midpoint."""
    late_sd: float = 1.2
    """Standard deviation for a late midpoint."""
    gain_alpha: float = 1.0
    """First Beta parameter of the share (A - R_0) / (1 - R_0)."""
    gain_beta: float = 2.0
    """Second Beta parameter of that share; with 1 and 2 the density falls linearly to 0 at A = 1."""
    noise_shape: float = 8.0
    """Shape of the inverse-gamma prior of the noise variance for a known validation size."""
    noise_share: float = 0.5
    """Center of that prior as a share of p (1 - p) / (prompts x generations). Below 1 because prompts differ in
    difficulty."""
    unknown_noise: float = 0.005
    """Center of the noise (standard deviation, in pass rate) for an unknown validation size."""
    unknown_noise_shape: float = 1.0
    """Shape of the inverse-gamma prior for an unknown validation size: much weaker."""
    discrepancies: tuple[Discrepancy, ...] = (
        Discrepancy(deviation=0.0, length=0.5, weight=0.5),
        Discrepancy(deviation=0.01, length=0.5, weight=0.0270),
        Discrepancy(deviation=0.018, length=1.0, weight=0.3096),
        Discrepancy(deviation=0.018, length=2.0, weight=0.0986),
        Discrepancy(deviation=0.03, length=2.0, weight=0.0648),
    )
    """The hypotheses, averaged by their posterior weights."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of each parameter. A fit on its edge gets a warning."""

    asymptote: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest A; the lower end is raised to R_0."""
    exponent: tuple[float, float] = (0.25, 8.0)
    """Lowest and highest B."""
    midpoint: tuple[float, float] = (3e-3, 100.0)
    """Lowest and highest C_mid, as multiples of the largest fitted compute."""


DEFAULT_BOUNDS = Bounds()
"""The bounds of `method="robust"`."""
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
"""Flat, with independent noise: its intervals are the narrowest that the paper's least squares justifies."""

"""The prior of the robust fit: unit-free, and the same for every run.

The prior is a mixture of kinds of runs; the points of a run weigh the kinds. No number here has a compute unit: the
midpoint is relative to the largest fitted compute, the asymptote a share of the room above R_0, the discrepancy a
share of sqrt(p (1 - p)). The kinds are the result of `tools/forecast/learning.py` on published and tiny runs.
"""

from megatron_scalerl.record import record


@record
class Discrepancy:
    """One hypothesis on how a run deviates from its sigmoid: a Gaussian process in log compute.

    The process is the sum of a random walk, a change of slope and a constant level.

    The residuals of real runs are correlated along the curve: plateaus of epochs, a data change, a slow
    instability. With independent noise alone the intervals are far too narrow. Deviations are shares of
    sqrt(p (1 - p)): a larger validation set does not reduce this property of the run.
    """

    weight: float
    """Prior probability of this hypothesis, relative to the other hypotheses."""
    walk: float = 0.0
    """Standard deviation of a random walk after one unit of log compute. The walk starts at the first point."""
    turn: float = 0.0
    """Standard deviation of a change of slope, per unit of log compute: the run is past the peak, or speeds up."""
    turn_from: float = 1.0
    """Share of the fitted compute at which the slope changes."""
    level: float = 0.0
    """Standard deviation of a constant distance from the sigmoid. If this field is above 0, the run has left the
    sigmoid: the forecast is the present level, without a return to the curve."""


@record
class Kind:
    """A kind of run in the prior: log B and log C_mid have Student's t, and the gain has a Beta distribution."""

    weight: float
    """Prior probability, relative to the other kinds."""
    log_exponent_mean: float
    """Center of log B."""
    log_exponent_sd: float
    """Scale of log B."""
    log_midpoint_mean: float
    """Center of log(C_mid / fitted compute)."""
    log_midpoint_sd: float
    """Scale of log(C_mid / fitted compute)."""
    gain_alpha: float
    """First parameter of the Beta distribution of (A - R_0) / (1 - R_0), the gain's share of the room above R_0."""
    gain_beta: float
    """Second parameter of the Beta distribution of (A - R_0) / (1 - R_0)."""


@record
class Prior:
    """Prior distribution of one run's sigmoid: a mixture of kinds of runs, without any unit of compute."""

    kinds: tuple[Kind, ...]
    """The kinds of runs, averaged by the posterior weight of each."""
    freedom: float = 4.0
    """Degrees of freedom of the Student's t distributions of log B and log C_mid."""
    noise_shape: float = 2.0
    """Shape of the inverse-gamma prior of the noise variance: as weak as four points, so that the run's own residuals
    decide. Greedy decoding of the same few prompts, for example, varies less than independent samples do."""
    noise_share: float = 0.4
    """Noise of a validation as a share of p (1 - p) / (prompts x generations) where it was not measured."""
    unknown_noise: float = 0.005
    """Center of the noise (standard deviation, in pass rate) for an unknown validation size."""
    unknown_noise_shape: float = 1.0
    """Shape of the inverse-gamma prior for an unknown validation size."""
    discrepancies: tuple[Discrepancy, ...]
    """The hypotheses on the discrepancy, averaged by the posterior weight of each."""


@record
class Bounds:
    """The range of each parameter. A fit on the edge of a range gets a warning."""

    asymptote: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest A; the lower end is raised to R_0."""
    exponent: tuple[float, float] = (0.25, 8.0)
    """Lowest and highest B."""
    midpoint: tuple[float, float] = (3e-3, 100.0)
    """Lowest and highest C_mid, as multiples of the largest fitted compute."""


DEFAULT_BOUNDS = Bounds()
"""The bounds of `method="robust"`."""
DISCREPANCIES = (
    Discrepancy(weight=0.36),
    Discrepancy(weight=0.40, walk=0.025),
    Discrepancy(weight=0.05, walk=0.15),
    Discrepancy(weight=0.03, walk=0.1, level=1.0),
    Discrepancy(weight=0.03, walk=0.4, level=1.0),
    Discrepancy(weight=0.015, turn=0.2, turn_from=0.67),
    Discrepancy(weight=0.015, turn=0.2, turn_from=0.83),
)
"""The hypotheses: no discrepancy, a weak and a strong random walk, a run that has left the sigmoid (two strengths),
and two changes of slope in the last third.

The numbers were chosen by the back-test (docs/forecast_method.md), not by tools/forecast/learning.py."""


def kind(
    weight: float, exponent: tuple[float, float], midpoint: tuple[float, float], gain: tuple[float, float]
) -> Kind:
    """The prior of a curve's parameters for one kind of run, which has the probability `weight`.

    exponent, midpoint: (center, scale) of the prior of log B and of log C_mid. gain: the two parameters of the Beta
    prior of the gain.
    """
    numbers = (weight, *exponent, *midpoint, *gain)
    return Kind(**dict(zip(Kind.__dataclass_fields__, numbers)))


DEFAULT_PRIOR = Prior(
    kinds=(
        # runs with a ceiling below 1
        kind(0.5509, (0.5527, 0.25), (-1.0480, 0.5), (6.8376, 17.1624)),
        # runs with a ceiling close to 1
        kind(0.1806, (0.4331, 0.25), (-1.2705, 0.5), (6.0, 1.0)),
        # runs that gain nothing
        kind(0.1806, (0.6, 0.5), (0.0, 1.2), (1.0, 20.0)),
        # any run that is of none of the three kinds above
        kind(0.088, (0.6, 0.5), (0.0, 1.2), (1.0, 1.0)),
    ),
    discrepancies=DISCREPANCIES,
)
"""The prior of `method="robust"`."""


FLAT_PRIOR = Prior(
    # one kind that is almost flat, so that the prior contains no knowledge of real runs
    kinds=(kind(1.0, (0.6, 1e3), (0.0, 1e3), (1.0, 1.0)),),
    discrepancies=(Discrepancy(weight=1.0),),
    # a shape of 1/2 has the weight of one point: the residuals set the noise
    noise_shape=0.5,
    unknown_noise_shape=0.5,
)
"""A flat prior with independent noise, for `method="paper"`.

Intervals are the narrowest that the paper's least squares justifies."""

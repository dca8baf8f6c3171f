"""The prior of the robust fit: unit-free, and the same for every run.

It is a mixture of kinds of runs; the points of a run weigh the kinds. No number here has a compute unit: the midpoint
is relative to the largest fitted compute, the asymptote a share of the room above R_0, the discrepancy a share of
sqrt(p (1 - p)). The kinds are the result of `tools/forecast/learning.py` on published and tiny runs.
"""

from dataclasses import replace

from megatron_scalerl.record import record


@record
class Discrepancy:
    """One hypothesis on the model discrepancy: how a run deviates from its sigmoid, as a process in log compute.

    The residuals of real runs are correlated along the curve: plateaus of epochs, a data change, a slow instability.
    With independent noise alone the intervals are far too narrow. A deviation of 1 is a run that collapses: it may go
    anywhere from where it is.
    """

    deviation: float
    """Standard deviation as a share of sqrt(p (1 - p)); 0 is no discrepancy. It is a property of the run: a larger
    validation set does not reduce it."""
    length: float
    """Correlation length in natural log of compute: with 0.3 the correlation drops to 1/e over 35 % more compute."""
    weight: float
    """Prior probability of this hypothesis, relative to the others."""


@record
class Kind:
    """A kind of run: where its sigmoid lies. log B and log C_mid have Student's t, the gain a Beta distribution."""

    name: str
    """What runs of this kind do."""
    weight: float
    """Prior probability, relative to the other kinds."""
    log_exponent_mean: float
    """Center of log B."""
    log_exponent_sd: float
    """Scale of log B."""
    log_midpoint_mean: float
    """Center of log(C_mid / compute of the whole run)."""
    log_midpoint_sd: float
    """Scale of it."""
    gain_alpha: float
    """First Beta parameter of the share (A - R_0) / (1 - R_0): the gain, of the room that there is."""
    gain_beta: float
    """Second Beta parameter of that share."""


@record
class Prior:
    """Prior distribution of one run's sigmoid, unit-free: a mixture of kinds, which the run's points weigh."""

    kinds: tuple[Kind, ...]
    """The kinds of runs, averaged by their posterior weights."""
    looks: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.5, 0.25), (0.25, 0.25))
    """(share of the whole run that is made when it is fitted, probability): nobody knows how far along a run is."""
    freedom: float = 4.0
    """Degrees of freedom of Student's t."""
    noise_shape: float = 8.0
    """Shape of the inverse-gamma prior of the noise variance for a known validation size."""
    noise_share: float = 0.5
    """Noise of a validation as a share of p (1 - p) / (prompts x generations) where it was not measured (`noise`)."""
    unknown_noise: float = 0.005
    """Center of the noise (standard deviation, in pass rate) for an unknown validation size."""
    unknown_noise_shape: float = 1.0
    """Shape of the inverse-gamma prior for an unknown validation size: much weaker."""
    discrepancies: tuple[Discrepancy, ...]
    """The hypotheses on the discrepancy, averaged by their posterior weights."""
    second_phase: tuple[float, float] = (0.04, 0.5)
    """(probability, size) of a second rise after the fitted part, of which no fitted point tells: of half a normal
    distribution, times the gain so far and the root of the log of compute. Chosen by the back-test, as the above."""


@record
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
DISCREPANCIES = tuple(
    Discrepancy(deviation=deviation, length=length, weight=weight)
    for deviation, length, weight in (
        (0.0, 0.5, 0.32),
        (0.03, 2.0, 0.20),
        (0.03, 4.0, 0.20),
        (0.2, 4.0, 0.23),
        (1.0, 4.0, 0.05),
    )
)
"""None, small ones, a slow drift that is nearly a random walk, and a collapse: chosen by the back-test
(docs/forecast_method.md), not learned."""


def kind(
    name: str, weight: float, exponent: tuple[float, float], midpoint: tuple[float, float], gain: tuple[float, float]
) -> Kind:
    """A kind of runs: (center, scale) of log B and of log C_mid, and the Beta parameters of the gain."""
    numbers = [*Kind.__dataclass_fields__][2:]
    return Kind(name=name, weight=weight, **dict(zip(numbers, (*exponent, *midpoint, *gain))))


DEFAULT_PRIOR = Prior(
    kinds=(
        kind("a ceiling below 1", 0.5046, (0.5808, 0.25), (-1.0420, 0.5), (6.9122, 17.0878)),
        kind("close to 1", 0.1806, (0.4271, 0.25), (-1.2569, 0.5), (6.0, 1.0)),
        kind("no gain", 0.2269, (0.6, 0.5), (0.0, 1.2), (1.0, 20.0)),
        kind("anything", 0.088, (0.6, 0.5), (0.0, 1.2), (1.0, 1.0)),
    ),
    discrepancies=DISCREPANCIES,
)
"""The prior of `method="robust"`."""


def wide(*, exponent_sd: float, midpoint_sd: float, discrepancies: tuple[Discrepancy, ...]) -> Prior:
    """A prior of one kind, without any notion of what runs do: every gain is as likely."""
    anything = kind("anything", 1.0, (0.6, exponent_sd), (0.0, midpoint_sd), (1.0, 1.0))
    return Prior(kinds=(anything,), looks=((1.0, 1.0),), discrepancies=discrepancies)


FLAT_PRIOR = replace(
    wide(exponent_sd=1e3, midpoint_sd=1e3, discrepancies=(Discrepancy(deviation=0.0, length=1.0, weight=1.0),)),
    noise_shape=0.5,
    unknown_noise_shape=0.5,
    second_phase=(0.0, 0.0),
)
"""Flat, with independent noise: its intervals are the narrowest that the paper's least squares justifies."""

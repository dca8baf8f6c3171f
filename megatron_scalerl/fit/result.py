"""The result of a fit: parameters with intervals, warnings, forecasts, and the forecasts' errors on unseen points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from megatron_scalerl.fit.checks import Fall, falling_tail
from megatron_scalerl.fit.observations import first_invalid
from megatron_scalerl.fit.posterior import Posterior
from megatron_scalerl.fit.sigmoid import PARAMETERS, Array, sigmoid
from megatron_scalerl.record import record

LEVEL = 0.90
"""Nominal coverage of every interval of this package."""
TAIL = (1.0 - LEVEL) / 2.0
"""Probability on either side of an interval."""


@record
class Prediction:
    """Forecast of one measured validation pass rate."""

    compute: float
    """Training compute, in the run's unit."""
    pass_rate: float
    """The forecast, in [0, 1]."""
    lo: float
    """Lower end of the 90 % interval of a measurement."""
    hi: float
    """Upper end of the 90 % interval."""


@record
class FitResult:
    """A run's sigmoid (Khatri et al. 2025, eq. 1) with uncertainty and warnings."""

    name: str
    """Name of the run."""
    method: str
    """Method of the fit, "robust" or "paper"."""
    asymptote: float
    """A, pass rate at unlimited compute."""
    exponent: float
    """B, steepness."""
    midpoint: float
    """C_mid, compute at half of the gain, in the run's unit."""
    initial: float
    """R_0, pass rate before any RL compute."""
    intervals: Mapping[str, tuple[float, float]]
    """90 % interval of "asymptote", "exponent" and "midpoint"."""
    n_points: int
    """Number of fitted points, inside the window. Points of equal compute count separately."""
    rmse: float
    """Root mean square of the fitted points around the sigmoid, in pass rate."""
    warnings: tuple[str, ...]
    """One sentence per reason to trust the forecast less."""
    compute: Array = field(repr=False)
    """[n_points] fitted compute."""
    pass_rate: Array = field(repr=False)
    """[n_points] fitted pass rates."""
    posterior: Posterior = field(repr=False, compare=False)
    """Posterior draws of the parameters, from whose quantiles the intervals are made."""
    unit: str = "gpu_hours"
    """Unit of compute: a name such as "gpu_hours" or "steps", or the name of a column."""

    @property
    def parameters(self) -> dict[str, float]:
        """The keyword arguments of `sigmoid.sigmoid`."""
        return {key: getattr(self, key) for key in PARAMETERS}

    @property
    def fall(self) -> Fall | None:
        """The fall of the pass rate after a peak; None if the run does not fall."""
        return falling_tail(self.compute, self.pass_rate)

    def curve(self, compute: Sequence[float] | Array) -> Array:
        """Pass rate of the fitted sigmoid, without the deviation of the run from the sigmoid; in the shape of
        `compute`.

        Raises ValueError for compute <= 0.
        """
        return sigmoid(compute, **self.parameters)

    def predict(
        self, compute: Sequence[float] | Array, *, completions: Sequence[float] | Array | None = None
    ) -> list[Prediction]:
        """Forecast of a measured pass rate at each compute [n], with its 90 % interval.

        completions: [n] prompts x generations of each measurement; default: the median of the fitted points.
        Raises ValueError for compute <= 0, for completions that are not n numbers >= 1, and for completions if the
        fit was given no validation size.
        """
        computes = np.asarray(compute, dtype=float).reshape(-1)
        if not np.all(np.isfinite(computes) & (computes > 0)):
            raise ValueError(
                f"predict: every compute has to be finite and above 0, but the computes are {computes.tolist()}"
            )
        sizes = None
        if completions is not None:
            if self.posterior.observations.completions is None:
                raise ValueError("predict: completions require a fit with prompts and generations")
            sizes = np.asarray(completions, dtype=float)
            if sizes.shape != computes.shape:
                problem = f"the shape is {sizes.shape}; give one number for each of {len(computes)} computes"
                raise ValueError(f"predict: completions: {problem}")
            valid = np.isfinite(sizes) & (sizes >= 1)
            if not np.all(valid):
                raise ValueError(f"predict: completions: {first_invalid(sizes, valid)} is not a number of at least 1")
        center, draws = self.posterior.measured(computes, sizes)
        if self.method == "paper":
            center = self.curve(computes)
        lo, hi = np.quantile(draws, [TAIL, 1.0 - TAIL], axis=0)
        # intervals are widened to contain the center: for "paper", the grid's best cell and no quantile of draws
        columns = (computes, center, np.minimum(lo, center), np.maximum(hi, center))
        keys = ("compute", "pass_rate", "lo", "hi")
        return [Prediction(**dict(zip(keys, numbers))) for numbers in np.transpose(columns).tolist()]

    def evaluate(
        self,
        compute: Sequence[float] | Array,
        pass_rate: Sequence[float] | Array,
        *,
        completions: Sequence[float] | Array | None = None,
    ) -> ForecastEvaluation:
        """Compare the forecast with measured points [n]; completions: see `predict`.

        Raises ValueError where `predict` does, and if `pass_rate` is not n numbers in [0, 1].
        """
        measured = np.asarray(pass_rate, dtype=float).reshape(-1)
        predictions = tuple(self.predict(compute, completions=completions))
        valid = (measured >= 0) & (measured <= 1)
        if not np.all(valid):
            raise ValueError(f"evaluate: pass_rate: {first_invalid(measured, valid)} is not in [0, 1]")
        if len(measured) != len(predictions):
            raise ValueError(f"evaluate: {len(measured)} pass rates were given for {len(predictions)} computes")
        return ForecastEvaluation(fit=self, predictions=predictions, measured=measured)


@record
class ForecastEvaluation:
    """A forecast compared with measured points that were not fitted."""

    fit: FitResult
    """The fit behind the forecast."""
    predictions: tuple[Prediction, ...]
    """One forecast for each measured point."""
    measured: Array = field(repr=False)
    """[n] measured pass rates in [0, 1]."""

    @property
    def errors(self) -> Array:
        """[n] measured minus forecast pass rate."""
        return self.measured - np.array([p.pass_rate for p in self.predictions])

    @property
    def covered(self) -> Array:
        """[n] 1.0 where the measured point lies inside the 90 % interval of the forecast, else 0.0."""
        return np.array([float(p.lo <= y <= p.hi) for p, y in zip(self.predictions, self.measured)])

    def summary(self) -> str:
        """One line: the mean absolute error, and the number of measured points inside the intervals."""
        inside = f"{self.covered.sum():.0f} of {len(self.covered)} measurements inside their interval"
        return f"mean absolute error {abs(self.errors).mean():.4f}; {inside}"

"""What a fit hands on: parameters with intervals, warnings in words, and forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_scalerl.fit.posterior import Posterior
from megatron_scalerl.fit.sigmoid import Array, sigmoid

LEVEL = 0.90
"""Probability that every interval of this package is meant to hold."""
TAIL = (1.0 - LEVEL) / 2.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Forecast of one measured validation pass rate."""

    compute: float
    """Where on the compute axis, in the run's unit."""
    pass_rate: float
    """The forecast."""
    lo: float
    """Lower end of the 90 % interval of a measured point of the same validation size."""
    hi: float
    """Upper end of it."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """One run's sigmoid (Khatri et al. 2025, eq. 1), how sure it is, and what was odd about the run."""

    name: str
    """The run."""
    method: str
    """"robust" or "paper"."""
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
    """Points fitted, after the window and after joining nothing: duplicates count."""
    rmse: float
    """Root mean square of the fitted points around the sigmoid, in pass rate."""
    warnings: tuple[str, ...]
    """One sentence for each thing that makes the forecast less trustworthy."""
    compute: Array = field(repr=False)
    """[n_points] fitted compute."""
    pass_rate: Array = field(repr=False)
    """[n_points] fitted pass rates."""
    posterior: Posterior = field(repr=False, compare=False)
    """Draws that the intervals come from."""
    unit: str = "gpu_hours"
    """Unit of the compute axis, as the ledger names it."""

    def curve(self, compute: Sequence[float] | Array) -> Array:
        """The sigmoid at the fitted parameters, without the run's present wander."""
        return sigmoid(
            compute,
            asymptote=self.asymptote,
            exponent=self.exponent,
            midpoint=self.midpoint,
            initial=self.initial,
        )

    def predict(self, compute: Sequence[float] | Array, *, noise_factor: float = 1.0) -> list[Prediction]:
        """Forecast of a measured pass rate at each compute, with its 90 % interval.

        noise_factor: variance of the new measurement relative to the fitted ones (2.0 for half the prompts).
        Raises ValueError for compute <= 0.
        """
        at = np.asarray(compute, dtype=float).reshape(-1)
        if at.size == 0:
            return []
        if not np.all(np.isfinite(at)) or np.any(at <= 0):
            raise ValueError(f"predict: expected compute > 0, found {at.tolist()}")
        centre, draws = self.posterior.measured(at, noise_factor=noise_factor)
        if self.method == "paper":
            centre = self.curve(at)
        lo, hi = np.quantile(draws, [TAIL, 1.0 - TAIL], axis=0)
        lo, hi = np.minimum(lo, centre), np.maximum(hi, centre)
        return [
            Prediction(compute=float(c), pass_rate=float(p), lo=float(low), hi=float(high))
            for c, p, low, high in zip(at, centre, lo, hi)
        ]

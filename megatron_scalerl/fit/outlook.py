"""The forecast of a run's end, made after every validation.

A forecast depends on the validations up to its step alone, so a later call repeats it: the same rows give the same
bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_scalerl.fit.backtest import MIN_POINTS
from megatron_scalerl.fit.decide import Verdict, decide
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.inputs import curve_of_rows, unconfirmed
from megatron_scalerl.fit.result import FitResult, Prediction
from megatron_scalerl.record import record

DRAWS = 1000
"""Number of posterior draws of each fit."""
PATH_POINTS = 24
"""Number of forecasts in `Projection.path`."""
LARGEST_NUMBER = 1e15
"""Largest number in a valid row; a larger number means that the file is damaged."""
LIMITS: dict[str, tuple[Any, float]] = {
    "step": (int, LARGEST_NUMBER),
    "compute": (int | float, LARGEST_NUMBER),
    "pass_rate": (int | float, 1),
}
"""Key of a row -> (type, largest value). The smallest value is 0."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of validation.jsonl, the row of step 0 first."""


def checked_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a row of validation.jsonl, whose numbers are checked.

    Raises ValueError unless the row has a step, a compute and a pass rate within `LIMITS`.
    """
    checked = dict(row)
    for key, (kind, largest) in LIMITS.items():
        value: Any = checked.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= largest:
            description = f"{key} {str(value)[:40]!a}" if key in checked else f"no {key}"
            raise ValueError(f"expected a validation (step, compute, pass_rate), found {description}")
    return checked


@record
class Outlook:
    """The forecast of the run's last validation, made after an earlier validation."""

    step: int
    """Optimizer steps that the run had made at the time of the forecast."""
    end_step: int
    """Steps of the whole run."""
    pass_rate: float
    """Forecast at `end_step`, in [0, 1]."""
    lo: float
    """Lower end of the 90 % interval of a measurement with the validation size so far."""
    hi: float
    """Upper end of the 90 % interval of the measurement."""
    verdict: Verdict
    """Whether the rest of the run is worth its compute."""
    unconfirmed: str = ""
    """Result of `inputs.unconfirmed` for the last validation; empty if the judge confirms the pass rate."""

    def line(self) -> str:
        """The forecast in one line: `at step 7400: 0.612 [0.584, 0.641]; go on`."""
        line = f"at step {self.end_step}: {self.pass_rate:.3f} [{self.lo:.3f}, {self.hi:.3f}]; {self.verdict}"
        return f"{line}; {self.unconfirmed}" if self.unconfirmed else line


@record
class Projection:
    """An outlook, with the forecast from now to the end of the run, for a figure."""

    outlook: Outlook
    path: tuple[Prediction, ...]
    """`PATH_POINTS` forecasts at equal distances of compute, from the last validation to the end of the run."""


@record
class RunFit:
    """The fit of all validations of a run, which is under way or over."""

    result: FitResult
    """Ceiling, intervals, and the forecast at any compute."""
    last_step: int
    """Step of the last validation that was fitted."""
    last_compute: float
    """Compute of the last validation, in the run's unit."""
    end_compute: float
    """Compute at the run's end, extrapolated in proportion to the steps; `last_compute` if the run is over."""
    outlook: Outlook | None
    """The forecast of the run's end; None for a run that is over."""


def run_fit(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> RunFit | None:
    """Fit the validations of a run of `steps` steps, which may be over.

    None if there is no row of step 0, whose pass rate is R_0, if R_0 is 1, and for fewer than `MIN_POINTS` rows to
    fit. Raises ValueError for rows that cannot be fitted.
    """
    latest = {}
    for number, row in enumerate(rows, 1):
        try:
            checked = checked_row(row)
        except ValueError as error:
            raise ValueError(f"validation.jsonl: row {number}: {error}") from None
        latest[checked["step"]] = checked  # a resumed run validates a step again: the last row of a step counts
    used = [row for step, row in latest.items() if step >= max(fit_from_steps, 1) and row["compute"] > 0]
    if 0 not in latest or latest[0]["pass_rate"] >= 1.0 or len(used) < MIN_POINTS:
        return None
    last = used[-1]
    # `curve_of_rows` may merge rows of one compute into a point, so the points are counted after the rows
    curve = curve_of_rows([latest[0], *used], name="run")
    if len(curve.compute) < MIN_POINTS:
        return None
    result = fit_curve(curve, draws=DRAWS)
    end = last["compute"] * max(1.0, steps / last["step"])
    forecast = None
    if last["step"] < steps:
        [measured] = result.predict([end])
        forecast = Outlook(
            step=last["step"],
            end_step=steps,
            pass_rate=measured.pass_rate,
            lo=measured.lo,
            hi=measured.hi,
            verdict=decide(result, budget=end - last["compute"]).verdict,
            unconfirmed=unconfirmed(last),
        )
    return RunFit(
        result=result,
        last_step=last["step"],
        last_compute=last["compute"],
        end_compute=end,
        outlook=forecast,
    )


def outlook(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> Outlook | None:
    """The forecast from `rows` for the end of a run of `steps`.

    fit_from_steps: rows of earlier steps are left out of the fit. The compute at the end is extrapolated from the
    last row in proportion to the steps. None at the end of the run, and where `run_fit` returns None.
    Raises ValueError for a row that `checked_row` refuses.
    """
    fitted = run_fit(rows, steps=steps, fit_from_steps=fit_from_steps)
    if fitted is None:
        return None
    return fitted.outlook


def projection(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> Projection | None:
    """The outlook from `rows`, with `PATH_POINTS` forecasts up to the run's end; None if `outlook` returns None."""
    fitted = run_fit(rows, steps=steps, fit_from_steps=fit_from_steps)
    if fitted is None or fitted.outlook is None:
        return None
    path = fitted.result.predict(np.linspace(fitted.last_compute, fitted.end_compute, PATH_POINTS))
    return Projection(outlook=fitted.outlook, path=tuple(path))


def outlooks(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> list[Outlook]:
    """The forecasts after each validation, in the order of the validations."""
    prefixes = (rows[:end] for end in range(1, len(rows) + 1))
    forecasts = (outlook(prefix, steps=steps, fit_from_steps=fit_from_steps) for prefix in prefixes)
    return list(filter(None, forecasts))

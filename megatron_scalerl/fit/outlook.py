"""The forecast of a run's end, made after every validation: how it moved, and what came.

It depends on the validations up to then alone, so that it can be made again later: the same rows give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_scalerl.fit.backtest import MIN_POINTS
from megatron_scalerl.fit.decide import Verdict, decide
from megatron_scalerl.fit.forecast import fit_curve
from megatron_scalerl.fit.inputs import curve_of_rows, with_compute

DRAWS = 1000
"""Draws of each fit."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of validation.jsonl, that of step 0 first."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The forecast of the run's last validation, made after one of its validations."""

    step: int
    """Optimizer steps when it was made."""
    end_step: int
    """Steps of the whole run."""
    pass_rate: float
    """Forecast at `end_step`, in [0, 1]."""
    lo: float
    """Lower end of its 90 % interval, of a measurement with the validation size so far."""
    hi: float
    """Upper end of it."""
    verdict: Verdict
    """Whether the rest of the run is worth its compute."""

    def line(self) -> str:
        """In one line: `at step 7400: 0.612 [0.584, 0.641]; go on`."""
        return f"at step {self.end_step}: {self.pass_rate:.3f} [{self.lo:.3f}, {self.hi:.3f}]; {self.verdict}"


def outlook(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> Outlook | None:
    """The forecast from `rows` for the end of a run of `steps`.

    fit_from_steps: rows before this step are left out of the fit. The compute of the end is the last row's in
    proportion to the steps. None without a row of step 0, with fewer than `MIN_POINTS` rows to fit, and at the end.
    """
    latest = {row["step"]: with_compute(dict(row)) for row in rows}
    start, used = latest.get(0), [r for s, r in latest.items() if s >= max(fit_from_steps, 1) and r["compute"] > 0]
    if start is None or len(used) < MIN_POINTS or used[-1]["step"] >= steps or start["pass_rate"] >= 1.0:
        return None
    last, curve = used[-1], curve_of_rows([start, *used], name="run")
    if len(curve.compute) < MIN_POINTS:
        return None
    end = last["compute"] * steps / last["step"]
    result = fit_curve(curve, draws=DRAWS)
    [forecast] = result.predict([end])
    return Outlook(
        step=last["step"],
        end_step=steps,
        pass_rate=forecast.pass_rate,
        lo=forecast.lo,
        hi=forecast.hi,
        verdict=decide(result, budget=end - last["compute"]).verdict,
    )


def outlooks(rows: Rows, *, steps: int, fit_from_steps: int = 0) -> list[Outlook]:
    """The forecasts that were made after each validation, in their order."""
    made = (outlook(rows[:end], steps=steps, fit_from_steps=fit_from_steps) for end in range(1, len(rows) + 1))
    return [each for each in made if each is not None]

"""The forecasts of a run's end after each validation, as the page draws them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_scalerl.fit.outlook import Projection, projection
from megatron_scalerl.page.report import last_step, measured_end, moved_text

MOST = 128
"""Forecasts that are made for the page, at about equal distances: a fit takes a fifth of a second."""
Rows = Sequence[dict[str, Any]]


class Forecasts:
    """Forecasts by the number of validations that they are made from. They depend on these rows alone."""

    def __init__(self) -> None:
        self._projections: dict[int, tuple[Projection | None, str]] = {}
        """Number of validations -> (the forecast, if it was made; why it failed, if it did)."""
        self._rows: tuple[Any, ...] = ()
        """Step and pass rate of the validations so far."""

    def missing(self, rows: Rows) -> list[int]:
        """Numbers of validations whose forecast is missing, the newest first."""
        new = tuple((row.get("step"), row.get("pass_rate")) for row in rows)
        if self._rows != new[: len(self._rows)]:
            self._projections.clear()  # a restart took rows back
        self._rows = new
        stride = math.ceil(len(rows) / MOST) or 1
        # a forecast that only a smaller stride asked for stays, since the stride grows with the rows
        wanted = {len(rows), *range(stride, len(rows) + 1, stride)}
        return sorted((count for count in wanted if count not in self._projections), reverse=True)

    @staticmethod
    def attempt(rows: Rows, recipe: Mapping[str, Any], count: int) -> tuple[Projection | None, str]:
        """The forecast from the first `count` rows, or why it failed, in one line. Changes nothing."""
        start = recipe["forecast"]["fit_from_steps"]
        try:
            return projection(rows[:count], steps=last_step(rows, recipe), fit_from_steps=start), ""
        except (ValueError, ArithmeticError) as error:
            return None, f"forecast from {count} validations: {type(error).__name__}: {error}"

    def add(self, count: int, forecast: Projection | None, problem: str = "") -> None:
        """Keep the result of `attempt` for the first `count` rows."""
        self._projections[count] = (forecast, problem)

    @property
    def problem(self) -> str:
        """Why the newest of the forecasts that failed has failed; empty if none has."""
        newest_first = sorted(self._projections.items(), reverse=True)
        return next((problem for _, (_, problem) in newest_first if problem), "")

    def make_all(self, rows: Rows, recipe: Mapping[str, Any]) -> None:
        """Make all that are missing."""
        for count in self.missing(rows):
            self.add(count, *self.attempt(rows, recipe, count))

    @property
    def projections(self) -> list[Projection]:
        """The forecasts that did not fail, in the order of their validations."""
        return [forecast for _, (forecast, _) in sorted(self._projections.items()) if forecast is not None]

    def lines(self, rows: Rows, recipe: Mapping[str, Any]) -> list[str]:
        """The line of `report` that says how the forecasts moved; none without a forecast."""
        outlooks = [forecast.outlook for forecast in self.projections]
        if not outlooks:
            return []
        return [moved_text(outlooks, measured_end(rows, recipe))]

    def payload(self) -> list[dict[str, Any]]:
        """The forecasts with their paths: lists over points from the validation to the end of the run."""
        return [
            {
                "step": forecast.outlook.step,
                "end_step": forecast.outlook.end_step,
                "line": forecast.outlook.line(),
                "compute": [float(f"{point.compute:.6g}") for point in forecast.path],
                "pass_rate": [round(point.pass_rate, 4) for point in forecast.path],
                "lo": [round(point.lo, 4) for point in forecast.path],
                "hi": [round(point.hi, 4) for point in forecast.path],
            }
            for forecast in self.projections
        ]

"""The page's forecasts of a run's end, one after each validation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_scalerl.fit.outlook import Projection, projection
from megatron_scalerl.page.report import last_step, measured_end, moved_text

MAX_FORECASTS = 128
"""Most forecasts on a page, evenly spaced over a long run, since each fit takes 0.2 s."""
Rows = Sequence[dict[str, Any]]


class Forecasts:
    """The forecasts of one run. Forecast n is made from the first n validations alone."""

    def __init__(self) -> None:
        self._projections: dict[int, tuple[Projection | None, str]] = {}
        """Number of validations -> (forecast or None, reason of a failure or "")."""
        self._rows: tuple[Any, ...] = ()
        """Step and pass rate of the validations so far."""

    def missing_counts(self, rows: Rows) -> list[int]:
        """The numbers n, largest first, for which the page lacks a forecast from the first n validations."""
        row_keys = tuple((row.get("step"), row.get("pass_rate")) for row in rows)
        if self._rows != row_keys[: len(self._rows)]:
            self._projections.clear()  # a restart has changed the rows: no forecast holds
        self._rows = row_keys
        stride = math.ceil(len(rows) / MAX_FORECASTS) or 1
        # forecasts for every `stride`-th row are made; forecasts made with a smaller stride, for fewer rows, are kept
        counts = {len(rows), *range(stride, len(rows) + 1, stride)}
        return sorted((count for count in counts if count not in self._projections), reverse=True)

    @staticmethod
    def attempt(rows: Rows, recipe: Mapping[str, Any], count: int) -> tuple[Projection | None, str]:
        """Make a forecast from the first `count` rows: (forecast, ""), or (None, reason of the failure)."""
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
        """The reason of the newest failure of a forecast; empty without a failure."""
        newest_first = sorted(self._projections.items(), reverse=True)
        return next((problem for _, (_, problem) in newest_first if problem), "")

    def make_all(self, rows: Rows, recipe: Mapping[str, Any]) -> None:
        """Make all missing forecasts."""
        for count in self.missing_counts(rows):
            self.add(count, *self.attempt(rows, recipe, count))

    @property
    def projections(self) -> list[Projection]:
        """The forecasts that did not fail, in the order of the validations."""
        return [forecast for _, (forecast, _) in sorted(self._projections.items()) if forecast is not None]

    def lines(self, rows: Rows, recipe: Mapping[str, Any]) -> list[str]:
        """A list with the line of `report.moved_text`, on how far the forecasts moved; empty without a forecast."""
        outlooks = [forecast.outlook for forecast in self.projections]
        if not outlooks:
            return []
        return [moved_text(outlooks, measured_end(rows, recipe))]

    def payload(self) -> list[dict[str, Any]]:
        """The forecasts as JSON values. The lists of a forecast describe the curve that is drawn up to
        the run's end, with a value for each point."""
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

"""The forecasts of a run's end after each validation, as the page draws them."""

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
        self._made: dict[int, tuple[Projection | None, str]] = {}
        self._begin: tuple[Any, ...] = ()

    def missing(self, rows: Rows) -> list[int]:
        """Numbers of validations whose forecast is missing, the newest first."""
        begin = tuple((row.get("step"), row.get("pass_rate")) for row in rows)
        if self._begin != begin[: len(self._begin)]:
            self._made.clear()  # a restart took rows back
        self._begin = begin
        every = max(1, -(-len(rows) // MOST))
        wanted = {len(rows), *range(every, len(rows) + 1, every)}
        return sorted((count for count in wanted if count not in self._made), reverse=True)

    @staticmethod
    def attempt(rows: Rows, recipe: Mapping[str, Any], count: int) -> tuple[Projection | None, str]:
        """The forecast from the first `count` rows, or in one line why it failed. Changes nothing."""
        start = recipe["forecast"]["fit_from_steps"]
        try:
            return projection(rows[:count], steps=last_step(rows, recipe), fit_from_steps=start), ""
        except (ValueError, ArithmeticError) as error:
            return None, f"forecast from {count} validations: {type(error).__name__}: {error}"

    def add(self, count: int, made: Projection | None, problem: str = "") -> None:
        """Keep what `attempt` returned for the first `count` rows."""
        self._made[count] = (made, problem)

    @property
    def problem(self) -> str:
        """Why the newest of the forecasts that failed did; empty if none did."""
        return next((problem for _, (_, problem) in sorted(self._made.items(), reverse=True) if problem), "")

    def make_all(self, rows: Rows, recipe: Mapping[str, Any]) -> None:
        """Make all that are missing."""
        for count in self.missing(rows):
            self.add(count, *self.attempt(rows, recipe, count))

    @property
    def made(self) -> list[Projection]:
        """Those that there are, in the order of their validations."""
        return [made for _, (made, _) in sorted(self._made.items()) if made is not None]

    def lines(self, rows: Rows, recipe: Mapping[str, Any]) -> list[str]:
        """How the forecasts moved, as `report` says it."""
        if not self.made:
            return []
        return [moved_text([made.outlook for made in self.made], measured_end(rows, recipe))]

    def payload(self) -> list[dict[str, Any]]:
        """Each with its path: lists over equally distant points from its validation to the end of the run."""
        return [
            {
                "step": each.outlook.step,
                "end_step": each.outlook.end_step,
                "line": each.outlook.line(),
                "compute": [float(f"{p.compute:.6g}") for p in each.path],
                "pass_rate": [round(p.pass_rate, 4) for p in each.path],
                "lo": [round(p.lo, 4) for p in each.path],
                "hi": [round(p.hi, 4) for p in each.path],
            }
            for each in self.made
        ]

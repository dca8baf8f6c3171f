"""The tables of a forecast. One model: rich renders it in the terminal, a template in the HTML report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from megatron_scalerl.fit.backtest import Backtest
from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import Decision, Estimate
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.outlook import Outlook
from megatron_scalerl.fit.result import FitResult, ForecastEvaluation, Prediction


@dataclass(frozen=True, kw_only=True)
class WithInterval:
    """A cell with a value and its 90 % interval, which HTML shows below it."""

    value: str
    """The value, formatted."""
    interval: str
    """The interval, formatted, with its brackets."""

    def __str__(self) -> str:
        return f"{self.value} {self.interval}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text. Numbers are aligned right."""

    columns: tuple[str, ...]
    """The header. HTML sets the part after an underscore as a subscript: C_mid."""
    rows: tuple[tuple[str | WithInterval, ...], ...]
    """One cell per column."""
    title: str | None = None
    """Line above the table in the terminal."""
    labeled: bool = True
    """Whether the first column is a label, aligned left."""

    def rich(self) -> RichTable:
        """The table for a `rich.console.Console`. Cells are literal text, not markup."""
        table = RichTable(title=self.title and Text(self.title, style="table.title"), title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(Text(column), justify="left" if self.labeled and index == 0 else "right")
        for row in self.rows:
            table.add_row(*(Text(str(cell)) for cell in row))
        return table

    def markdown(self) -> str:
        """The table in Markdown; cells are literal text."""
        aligned = ["---" if self.labeled and n == 0 else "---:" for n in range(len(self.columns))]
        rows = [self.columns, tuple(aligned), *self.rows]
        return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything that is reported on one run."""

    curve: Curve
    """All points of the run."""
    fit: FitResult
    """The fit of those in the window."""
    predictions: tuple[Prediction, ...]
    """The forecast."""
    decision: Decision
    """The verdict."""
    evaluation: ForecastEvaluation | None = None
    """The forecast of the points after the window; None if there are none."""
    backtest: Backtest | None = None
    """With --backtest."""


def parameters_table(runs: Sequence[RunReport]) -> Table:
    """A, B, C_mid with their 90 % intervals, one run per row."""
    return Table(
        columns=("run", "A", "B", "C_mid", "R_0", "points", "rmse", "95 % of A at"),
        rows=tuple(
            (
                run.fit.name,
                _with_interval(run.fit.asymptote, run.fit.intervals["asymptote"], "{:.3f}".format),
                _with_interval(run.fit.exponent, run.fit.intervals["exponent"], "{:.2f}".format),
                _with_interval(run.fit.midpoint, run.fit.intervals["midpoint"], short_number),
                f"{run.fit.initial:.3f}",
                str(run.fit.n_points),
                f"{run.fit.rmse:.4f}",
                estimated_compute(run.decision.compute_to_95_percent_of_asymptote),
            )
            for run in runs
        ),
    )


def predictions_table(runs: Sequence[RunReport]) -> Table:
    """Forecast pass rates with the interval of a measurement."""
    return Table(
        columns=("run", unit_name(runs[0].fit.unit), "pass rate", "90 % interval"),
        rows=tuple((run.fit.name, short_number(p.compute), *_forecast(p)) for run in runs for p in run.predictions),
    )


def _forecast(p: Prediction) -> tuple[str, str]:
    return f"{p.pass_rate:.4f}", _interval(p.lo, p.hi, "{:.4f}".format)


def evaluation_table(evaluation: ForecastEvaluation) -> Table:
    """Forecast against measurement for points that were not fitted."""
    cells = zip(evaluation.predictions, evaluation.measured, evaluation.errors, evaluation.covered)
    return Table(
        title=f"{evaluation.fit.name}: points that were not fitted",
        labeled=False,
        columns=(unit_name(evaluation.fit.unit), "forecast", "90 % interval", "measured", "error", ""),
        rows=tuple(
            (short_number(p.compute), *_forecast(p), f"{measured:.4f}", f"{error:+.4f}", "" if covered else "outside")
            for p, measured, error, covered in cells
        ),
    )


def comparison_table(comparison: Comparison) -> Table:
    """The leave-one-out table of Khatri et al. (2025), Fig. 4, for these recipes, with intervals of the mean."""
    fixed, pass_rate = f"{comparison.fixed_asymptote:.3f}", f"{comparison.pass_rate:.3f}"
    return Table(
        columns=("recipe", "runs", "measured", "A", "B", "C_mid", f"B at A = {fixed}", f"compute to {pass_rate}"),
        rows=tuple(
            (
                arm.name,
                str(arm.runs),
                _estimated(arm.measured, "{:.3f}".format),
                _estimated(arm.asymptote, "{:.3f}".format),
                _estimated(arm.exponent, "{:.2f}".format),
                _estimated(arm.midpoint, short_number),
                "–" if arm.fixed_exponent is None else _estimated(arm.fixed_exponent, "{:.2f}".format),
                estimated_compute(arm.to_reach),
            )
            for arm in comparison.arms
        ),
    )


def _estimated(estimate: Estimate, style: Callable[[float], str]) -> WithInterval:
    return _with_interval(estimate.value, (estimate.lo, estimate.hi), style)


def outlook_table(outlooks: Sequence[Outlook], came: float | None) -> Table:
    """The forecasts of a run's end by the validation after which they were made. came: what was measured there."""
    end = outlooks[0].end_step
    return Table(
        title=f"Forecasts of step {end} after each validation" + (f"; {came:.3f} came" if came is not None else ""),
        labeled=False,
        columns=("after step", "forecast", "90 % interval", "error", "", "verdict"),
        rows=tuple(
            (
                str(each.step),
                f"{each.pass_rate:.3f}",
                _interval(each.lo, each.hi, "{:.3f}".format),
                "" if came is None else f"{came - each.pass_rate:+.3f}",
                "" if came is None or each.lo <= came <= each.hi else "outside",
                each.verdict,
            )
            for each in outlooks
        ),
    )


def backtest_table(test: Backtest) -> Table:
    """The forecast of the last point from every prefix."""
    return Table(
        labeled=False,
        columns=("fitted up to", "points", "forecast", "90 % interval", "error", "A"),
        rows=tuple(
            (
                short_number(point.compute),
                str(point.n_points),
                *_forecast(point.forecast),
                f"{point.forecast.pass_rate - test.final_pass_rate:+.4f}",
                f"{point.asymptote:.3f}",
            )
            for point in test.points
        ),
    )


def estimated_compute(estimate: Estimate) -> WithInterval:
    """A compute with its interval; "never" where it is infinite, "start" where R_0 is as high."""

    def text(compute: float) -> str:
        return "start" if compute == 0 else short_number(compute)

    return _with_interval(estimate.value, (estimate.lo, estimate.hi), text)


def _with_interval(value: float, interval: tuple[float, float], style: Callable[[float], str]) -> WithInterval:
    return WithInterval(value=style(value), interval=_interval(*interval, style))


def _interval(lo: float, hi: float, style: Callable[[float], str]) -> str:
    return f"[{style(lo)}, {style(hi)}]"

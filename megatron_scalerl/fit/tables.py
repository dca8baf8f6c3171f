"""The results of a forecast as tables in a terminal (with rich), as JSON and as an HTML page.

A page is one file that loads nothing from elsewhere. JSON has no inf and nan: both become null.
"""

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from megatron_scalerl.fit.backtest import Backtest
from megatron_scalerl.fit.compare import Comparison, conclusions, left_out, summary
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import Decision, Estimate
from megatron_scalerl.fit.formatting import short_number, unit_name
from megatron_scalerl.fit.outlook import Outlook
from megatron_scalerl.fit.plot import title_of
from megatron_scalerl.fit.result import FitResult, ForecastEvaluation, Prediction
from megatron_scalerl.record import record

TEMPLATES = Path(__file__).parent / "templates"
OUTSIDE = {True: "", False: "outside"}
"""Whether a measurement lies inside the forecast's interval -> text of the table's cell."""
EXPONENT = "{:.2f}".format
RATE = "{:.3f}".format
PIPE_WIDTH = 200
"""Width of a table that is not printed to a terminal (characters)."""
PRECISE = "{:.4f}".format
"""Format of the forecast and measured pass rates of single points."""


@record
class Table:
    """A table of text cells, for a terminal or HTML. Numbers are aligned right."""

    columns: tuple[str, ...]
    """Texts of the header row, one per column."""
    rows: tuple[tuple[str, ...], ...]
    """Texts of each row's cells, one per column. HTML shows an interval in brackets below the value."""
    title: str | None = None
    """Line that the terminal shows above the table."""
    labels: int = 1
    """Number of leading columns that hold words, which are aligned left."""

    def __rich__(self) -> RichTable:
        """The table for a `rich.console.Console`. Cells are literal text, not markup."""
        title = self.title and Text(self.title, style="table.title")
        table = RichTable(title=title, title_justify="left", show_header=any(self.columns))
        for number, column in enumerate(self.columns):
            table.add_column(Text(column), justify="left" if number < self.labels else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table


def show(items: Iterable[Table | str], console: Console) -> None:
    """Print tables and lines."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    for item in items:
        # lines of text are printed without wrapping; a table is wrapped, since the cells have to fit
        console.print(item, soft_wrap=isinstance(item, str))


Style = Callable[[float], str]
"""A function that writes a number as text."""
Section = tuple[str, tuple[Table | str, ...]]
"""A section of the report as (heading, tables and lines of text)."""


@record
class RunReport:
    """The results of one run that the command reports."""

    curve: Curve
    """All points of the run."""
    fit: FitResult
    """The fit of the points from --fit-from to --fit-until."""
    predictions: tuple[Prediction, ...]
    """Forecasts at the computes of --predict."""
    decision: Decision
    """Whether to continue the run, and why."""
    evaluation: ForecastEvaluation | None = None
    """The forecast of the points after the fitted window; None if no point lies there."""
    backtest: Backtest | None = None
    """The back-test; None without --backtest."""


def sections(runs: Sequence[RunReport]) -> list[Section]:
    """Sections of the report: fitted parameters, forecasts, and forecasts compared with points that were not
    fitted."""
    parameters = Table(
        columns=("run", "A", "B", "C_mid", "R_0", "points", "rmse", "95 % of A at"),
        rows=tuple(
            (
                run.fit.name,
                _parameter(run.fit, "asymptote", RATE),
                _parameter(run.fit, "exponent", EXPONENT),
                _parameter(run.fit, "midpoint", short_number),
                f"{run.fit.initial:.3f}",
                str(run.fit.n_points),
                f"{run.fit.rmse:.4f}",
                estimated_compute(run.decision.compute_to_95_percent_of_asymptote),
            )
            for run in runs
        ),
    )
    forecasts = Table(
        columns=("run", unit_name(runs[0].fit.unit), "pass rate", "90 % interval"),
        rows=tuple((run.fit.name, short_number(p.compute), *_forecast(p)) for run in runs for p in run.predictions),
    )
    evaluations: list[Section] = []
    for run in runs:
        if run.evaluation is not None:
            table = evaluation_table(run.evaluation)
            evaluations.append((table.title or "", (table, run.evaluation.summary())))
    return [("Fit", (parameters,)), ("Forecast", (forecasts,)), *evaluations]


def _forecast(p: Prediction) -> tuple[str, str]:
    return f"{p.pass_rate:.4f}", _interval(p.lo, p.hi, PRECISE)


def evaluation_table(evaluation: ForecastEvaluation) -> Table:
    """The table of forecasts and measurements for points that were not fitted."""
    cells = zip(evaluation.predictions, evaluation.measured, evaluation.errors, evaluation.covered)
    return Table(
        title=f"{evaluation.fit.name}: points that were not fitted",
        labels=0,
        columns=(unit_name(evaluation.fit.unit), "forecast", "90 % interval", "measured", "error", ""),
        rows=tuple(
            (short_number(p.compute), *_forecast(p), f"{measured:.4f}", f"{error:+.4f}", OUTSIDE[bool(covered)])
            for p, measured, error, covered in cells
        ),
    )


def further_sections(runs: Sequence[RunReport], comparison: Comparison | None) -> list[Section]:
    """Further sections of the report: the runs' back-tests, and the comparison of the runs' recipes."""
    sections: list[Section] = []
    for run in runs:
        if run.backtest is not None:
            sections.append((f"Backtest: {run.fit.name}", _backtest(run.backtest)))
    if comparison is not None:
        sections.append(("Comparison", _comparison(comparison)))
    return sections


def _backtest(test: Backtest) -> tuple[Table, str]:
    rows = tuple(
        (
            short_number(point.compute),
            str(point.n_points),
            *_forecast(point.forecast),
            f"{point.forecast.pass_rate - test.final_pass_rate:+.4f}",
            f"{point.asymptote:.3f}",
        )
        for point in test.points
    )
    columns = ("fitted up to", "points", "forecast", "90 % interval", "error", "A")
    return Table(labels=0, columns=columns, rows=rows), test.summary()


def _comparison(comparison: Comparison) -> tuple[Table | str, ...]:
    """The runs that fall, then the leave-one-out table of Khatri et al. (2025), Fig. 4, and conclusions in words."""
    if not comparison.arms:
        return tuple(left_out(comparison))
    pass_rate = f"{comparison.pass_rate:.3f}"
    at = f"at {short_number(comparison.budget)}"
    table = Table(
        columns=("recipe", "runs", "measured", "A", "B", "C_mid", f"compute to {pass_rate}", at, "best there"),
        rows=tuple(
            (
                arm.name,
                str(arm.runs),
                _estimated(arm.measured, RATE),
                _estimated(arm.asymptote, RATE),
                _estimated(arm.exponent, EXPONENT),
                _estimated(arm.midpoint, short_number),
                estimated_compute(arm.to_reach),
                _estimated(arm.level, RATE),
                f"{arm.best:.2f}",
            )
            for arm in comparison.arms
        ),
    )
    summaries = [
        summary(comparison, arm) + (arm.change and f" Its recipe sets {arm.change}.") for arm in comparison.arms
    ]
    return (*left_out(comparison), table, *conclusions(comparison), *summaries)


def outlook_table(outlooks: Sequence[Outlook], came: float | None) -> Table:
    """The table of forecasts of a run's end, one after each validation. came: the pass rate measured at the end; None
    if not measured yet."""
    title = f"Forecasts of step {outlooks[0].end_step} after each validation"
    if came is not None:
        title += f"; measured at the end: {came:.3f}"
    rows = []
    for outlook in outlooks:
        error = ""
        inside = True
        if came is not None:
            error = f"{came - outlook.pass_rate:+.3f}"
            inside = outlook.lo <= came <= outlook.hi
        interval = _interval(outlook.lo, outlook.hi, RATE)
        rows.append((str(outlook.step), RATE(outlook.pass_rate), interval, error, OUTSIDE[inside], outlook.verdict))
    return Table(
        title=title,
        labels=0,
        columns=("after step", "forecast", "90 % interval", "error", "", "verdict"),
        rows=tuple(rows),
    )


def estimated_compute(estimate: Estimate) -> str:
    """Text of a compute and its interval; "never" for an infinite compute, "start" for 0 (R_0 is enough).

    "[start, never]" means that the compute is unknown, because some draws never reach the pass rate.
    """
    return _estimated(estimate, lambda compute: "start" if compute == 0 else short_number(compute))


def _parameter(fit: FitResult, key: str, style: Style) -> str:
    return f"{style(fit.parameters[key])} {_interval(*fit.intervals[key], style)}"


def _estimated(estimate: Estimate, style: Style) -> str:
    return f"{style(estimate.value)} {_interval(estimate.lo, estimate.hi, style)}"


def _interval(lo: float, hi: float, style: Style) -> str:
    return f"[{style(lo)}, {style(hi)}]"


def run_json(run: RunReport) -> dict[str, Any]:
    """The entry of a run in the list `fits` of the JSON."""
    fit = run.fit
    return {
        "read": run.curve.read,
        **{key: getattr(fit, key) for key in ("name", "method", "n_points", "rmse", "unit")},
        **fit.parameters,
        "intervals": fit.intervals,
        "predictions": [asdict(prediction) for prediction in run.predictions],
        "warnings": fit.warnings,
        "verdict": run.decision.sentence(),
        "decision": _finite(run.decision),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The JSON of a comparison: the arms with intervals and runs, and the conclusions in words."""
    columns = ("name", "reference", "measured", "asymptote", "exponent", "midpoint", "to_reach", "level", "best")
    arms = []
    for arm in comparison.arms:
        runs = [
            {"name": fit.name, "seed": seed, **fit.parameters, "warnings": fit.warnings}
            for fit, seed in zip(arm.fits, arm.seeds)
        ]
        numbers = {key: _finite(getattr(arm, key)) for key in (*columns, "ceiling", "efficiency", "gap")}
        arms.append(numbers | {"runs": runs, "summary": summary(comparison, arm)})
    keys = ("pass_rate", "budget", "between_runs", "falling")
    return {
        **{key: _finite(getattr(comparison, key)) for key in keys},
        "conclusions": [*left_out(comparison), *conclusions(comparison)],
        "arms": arms,
    }


def _finite(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def html_page(runs: Sequence[RunReport], comparison: Comparison | None, *, figure: Path) -> str:
    """The HTML page with the results of runs, a comparison if any, and the figure (SVG) embedded."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # autoescape, since names of runs and columns come from the user's files
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("report.html").render(
        title=f"Forecast of {title_of([run.fit for run in runs])}",
        runs=runs,
        figure=base64.b64encode(figure.read_bytes()).decode(),
        sections=sections(runs),
        further_sections=further_sections(runs, comparison),
        compared=comparison is not None,
    )

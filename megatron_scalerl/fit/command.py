"""The command line of the forecast: `megatron-scalerl fit INPUT... [options]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.fit.compare import Comparison
    from megatron_scalerl.fit.curve import Curve
    from megatron_scalerl.fit.result import FitResult
    from megatron_scalerl.fit.tables import RunReport

PIPE_WIDTH = 200
"""Columns of a table that is not printed to a terminal."""


EPILOG = """example:
  megatron-scalerl fit runs/my_run --fit-until 8000 --predict 16000,50000 --html report.html

Every interval has a coverage of 90 %. docs/forecast.md says what to type for which file,
docs/forecast_method.md how the forecast works."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    p.description = "Fit a run's compute-performance curve, forecast it, and decide whether to continue the run."
    p.epilog = EPILOG
    files = "run folder, or file of W&B, TRL, verl, TensorBoard and others"
    p.add_argument("inputs", nargs="+", metavar="INPUT", help=files)
    p.add_argument("--compute", metavar="COL", help="column with the compute (or the step)")
    p.add_argument("--score", metavar="COL", help="column with the pass rate; of a task, pass_rate/TASK")
    p.add_argument("--score-range", metavar="LO,HI", help="range of the score, mapped to [0, 1]: --score-range=-1,1")
    series = "only rows where COL is VALUE; may be repeated; VALUE * makes one run of each value"
    p.add_argument("--series", metavar="COL=VALUE", action="append", default=[], help=series)
    p.add_argument("--hours-per-step", type=float, metavar="H", help="compute of a step, for tables with steps")
    p.add_argument("--r0", type=float, metavar="X", help="pass rate before RL; default: the run's own step 0")
    p.add_argument("--fit-from", type=float, metavar="C", help="leave points before C out of the fit")
    p.add_argument("--fit-until", type=float, metavar="C", help="leave points after C out; they are drawn hollow")
    p.add_argument("--predict", metavar="C1,C2,...", help="computes to forecast; default: 2, 5, 10 times the last")
    p.add_argument("--method", choices=("robust", "paper"), default="robust", help="default: robust")
    p.add_argument("--prompts", type=int, metavar="N", help="prompts in the validation set")
    p.add_argument("--generations", type=int, metavar="K", help="generations per prompt")
    p.add_argument("--json", metavar="OUT|-", help="write JSON; - prints it, and nothing else, to standard output")
    p.add_argument("--plot", metavar="OUT.png", help="draw PNG and SVG (both are written, side by side)")
    p.add_argument("--html", metavar="OUT.html", help="write a report in one self-contained file")
    p.add_argument("--compare", action="store_true", help="group the runs by recipe and compare the recipes")
    reference = "recipe that the others, or RECIPE alone, are compared with; default: the first"
    p.add_argument("--reference", metavar="[RECIPE=]NAME", action="append", default=[], help=reference)
    p.add_argument("--fixed-asymptote", type=float, metavar="X", help="hold A at X")
    p.add_argument("--budget", type=float, metavar="C", help="further compute to decide on; default: as much again")
    p.add_argument("--worth", type=float, metavar="X", help="gain that the budget has to buy; default 0.01")
    p.add_argument("--target", type=float, metavar="X", help="pass rate whose compute is estimated")
    p.add_argument("--backtest", action="store_true", help="refit at every prefix; in the HTML report, too")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit, print and write. Raises ValueError for invalid input, OSError for an unusable path."""
    if options.plot or options.html:  # a missing package is reported before the fit, not after it
        importlib.import_module("matplotlib")
    if options.html:
        importlib.import_module("jinja2")
    from megatron_scalerl.fit.compare import compare_runs
    from megatron_scalerl.fit.tables import comparison_json, run_json

    runs = [_run_report(curve, options) for curve in _with_unique_names(_read(options))]
    comparison = None
    if options.compare:
        fits = {run.curve.name: run.fit for run in runs}

        def fitted(curve: Curve, asymptote: float | None) -> FitResult:
            return fits[curve.name] if asymptote is None else _fit(curve, options, asymptote)

        curves = [run.curve for run in runs]
        comparison = compare_runs(curves, fitted, references=options.reference, pass_rate=options.target)
    made: dict[str, Any] = {"fits": [run_json(run) for run in runs]}
    if comparison is not None:
        made["comparison"] = comparison_json(comparison)
    text = json.dumps(made, indent=2, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        _print(runs, comparison)
        if options.json:
            _write(options.json, text)
    if options.plot or options.html:
        _draw(runs, comparison, options)
    return 0


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _read(options: argparse.Namespace) -> list[Curve]:
    """The curves of all inputs, with the validation size and R_0 of the options where those are given."""
    import numpy as np

    from megatron_scalerl.fit.inputs import ColumnOptions, read_curves

    series = []
    for pair in options.series:
        column, equals, value = pair.partition("=")
        if not equals or not column:
            raise ValueError(f"--series: expected COL=VALUE, found {pair!r}")
        series.append((column, value))
    ends = _numbers(options.score_range, "--score-range", "-1,1")
    if ends and not (len(ends) == 2 and ends[0] < ends[1]):
        raise ValueError(f"--score-range: expected the lowest and the highest value, found {options.score_range!r}")
    named = {key: getattr(options, key) for key in ("compute", "score", "hours_per_step")}
    columns = ColumnOptions(series=tuple(series), score_range=(ends[0], ends[1]) if ends else None, **named)
    given = {"initial": options.r0, "prompts": options.prompts, "initial_generations": options.generations}
    given = {key: value for key, value in given.items() if value is not None}
    curves = [replace(curve, **given) for path in options.inputs for curve in read_curves(path, columns)]
    units = {curve.unit: curve.name for curve in curves}
    if len(units) > 1:
        found = ", ".join(f"{unit} ({name})" for unit, name in units.items())
        raise ValueError(f"expected runs over one unit of compute, found {found}; choose with --compute")
    if options.generations is None:
        return curves
    return [replace(curve, generations=np.full(len(curve.compute), float(options.generations))) for curve in curves]


def _with_unique_names(curves: list[Curve]) -> list[Curve]:
    """Prefix the names that two runs share with their folder's name, or number them."""
    names = [curve.name for curve in curves]
    out = [f"{curve.source.resolve().parent.name}/{curve.name}" for curve in curves]
    out = [name if names.count(name) == 1 else longer for name, longer in zip(names, out)]
    out = [n if out.count(n) == 1 else f"{names[i]} ({out[: i + 1].count(n)})" for i, n in enumerate(out)]
    return [replace(curve, name=name) for curve, name in zip(curves, out)]


def _run_report(curve: Curve, options: argparse.Namespace) -> RunReport:
    from megatron_scalerl.fit.backtest import backtest
    from megatron_scalerl.fit.decide import WORTH, decide
    from megatron_scalerl.fit.tables import RunReport

    computes = _numbers(options.predict, "--predict", "16000,50000")
    if any(value <= 0 for value in computes):
        raise ValueError(f"--predict: expected computes > 0, found {options.predict!r}")
    result = _fit(curve, options, options.fixed_asymptote)
    rest = curve.part(curve.compute > (options.fit_until or float("inf")))
    evaluation, test = None, None
    if rest.compute.size:
        evaluation = result.evaluate(rest.compute, rest.pass_rate, completions=rest.completions)
    if options.backtest:
        test = backtest(curve, **_how(options))
    return RunReport(
        curve=curve,
        fit=result,
        predictions=tuple(result.predict(computes or [k * float(result.compute.max()) for k in (2, 5, 10)])),
        decision=decide(
            result,
            budget=options.budget,
            worth=WORTH if options.worth is None else options.worth,
            target=options.target,
        ),
        evaluation=evaluation,
        backtest=test,
    )


def _how(options: argparse.Namespace) -> dict[str, Any]:
    return {"method": options.method, "fit_from": options.fit_from}


def _fit(curve: Curve, options: argparse.Namespace, asymptote: float | None) -> FitResult:
    from megatron_scalerl.fit.forecast import fit_curve

    return fit_curve(curve, fit_until=options.fit_until, fixed_asymptote=asymptote, **_how(options))


def _numbers(text: str | None, option: str, example: str) -> list[float]:
    """The finite numbers of an option; none where it is not given."""
    try:
        values = [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        values = []
    if text is not None and not (values and all(abs(value) < float("inf") for value in values)):
        raise ValueError(f"{option}: expected numbers like {example}, found {text!r}")
    return values


def _print(runs: Sequence[RunReport], comparison: Comparison | None) -> None:
    from rich.console import Console

    from megatron_scalerl.fit import tables
    from megatron_scalerl.fit.compare import conclusions, summary

    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, markup=False, emoji=False)

    def show(items: Sequence[tables.Table | str]) -> None:
        for item in items:
            if isinstance(item, str):
                print(item)
            else:
                console.print(item.rich())

    show([run.curve.read for run in runs])
    for _, items in tables.sections(runs):
        show(items)
    for run in runs:
        if len(runs) > 1:
            print(f"\n{run.fit.name}")
        if run.decision.compute_to_target is not None:
            print(f"{run.decision.target:g} at {tables.estimated_compute(run.decision.compute_to_target)}")
        show([f"warning: {warning}" for warning in run.fit.warnings])
        print(f"verdict: {run.decision.sentence()}")
    for _, items in tables.backtests(runs):
        show(items)
    if comparison is not None:
        show([tables.comparison_table(comparison), *conclusions(comparison)])
        show([summary(comparison, arm) for arm in comparison.arms])


def _draw(runs: Sequence[RunReport], comparison: Comparison | None, options: argparse.Namespace) -> None:
    import numpy as np

    from megatron_scalerl.fit.plot import plot_forecast
    from megatron_scalerl.fit.tables import html_page

    fits, unseen = [run.fit for run in runs], {}
    for run in runs:
        rest = run.curve.part(~np.isin(run.curve.compute, run.fit.compute))
        unseen[run.fit.name] = rest.compute, rest.pass_rate
    computes = [p.compute for run in runs for p in run.predictions] if options.predict else []
    until = max([2.0 * max(float(run.curve.compute.max()) for run in runs), *computes])

    def drawn(path: Path) -> Path:
        return plot_forecast(path, fits, unseen=unseen, until=until, target=options.target)

    if options.plot:
        path = drawn(Path(options.plot))
        if path.suffix == ".png":
            drawn(path.with_suffix(".svg"))
    if not options.html:
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(options.html, html_page(runs, comparison, figure=drawn(Path(folder) / "forecast.svg")))

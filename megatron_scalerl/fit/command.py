"""The command line of the forecast: `megatron-scalerl fit INPUT... [options]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.fit.compare import Comparison
    from megatron_scalerl.fit.curve import Curve
    from megatron_scalerl.fit.plot import Points
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
    p.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the intervals; default 0")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit, print and write. Raises ValueError for invalid input, OSError for an unusable path."""
    for package in (["matplotlib"] if options.plot or options.html else []) + (["jinja2"] if options.html else []):
        importlib.import_module(package)  # a missing package is reported before the fit, not after it
    from megatron_scalerl.fit.json_output import comparison_json, fit_json

    runs = [_run_report(curve, options) for curve in _with_unique_names(_read(options))]
    comparison = _comparison(runs, options) if options.compare else None
    fits = [{"read": r.curve.read, **fit_json(r.fit, r.predictions, r.decision)} for r in runs]
    compared = {} if comparison is None else {"comparison": comparison_json(comparison)}
    text = json.dumps({"fits": fits} | compared, indent=2, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        _print(runs, comparison, options)
        if options.json:
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
            Path(options.json).write_text(text, encoding="utf-8")
    if options.plot or options.html:
        _draw(runs, comparison, options)
    return 0


def _read(options: argparse.Namespace) -> list["Curve"]:
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


def _with_unique_names(curves: list["Curve"]) -> list["Curve"]:
    """Prefix the names that two runs share with their folder's name, or number them."""
    names = [curve.name for curve in curves]
    out = [f"{curve.source.resolve().parent.name}/{curve.name}" for curve in curves]
    out = [name if names.count(name) == 1 else longer for name, longer in zip(names, out)]
    out = [n if out.count(n) == 1 else f"{names[i]} ({out[: i + 1].count(n)})" for i, n in enumerate(out)]
    return [replace(curve, name=name) for curve, name in zip(curves, out)]


def _run_report(curve: "Curve", options: argparse.Namespace) -> "RunReport":
    from megatron_scalerl.fit.backtest import backtest
    from megatron_scalerl.fit.decide import WORTH, decide
    from megatron_scalerl.fit.tables import RunReport

    computes = _numbers(options.predict, "--predict", "16000,50000")
    if any(value <= 0 for value in computes):
        raise ValueError(f"--predict: expected computes > 0, found {options.predict!r}")
    result = _fit(curve, options, options.fixed_asymptote)
    computes = computes or [k * float(result.compute.max()) for k in (2, 5, 10)]
    worth = WORTH if options.worth is None else options.worth
    rest = curve.part(curve.compute > (options.fit_until or float("inf")))
    return RunReport(
        curve=curve,
        fit=result,
        predictions=tuple(result.predict(computes)),
        decision=decide(result, budget=options.budget, worth=worth, target=options.target),
        evaluation=result.evaluate(rest.compute, rest.pass_rate, completions=rest.completions)
        if rest.compute.size
        else None,
        backtest=backtest(curve, **_how(options)) if options.backtest else None,
    )


def _how(options: argparse.Namespace) -> dict[str, Any]:
    return {"method": options.method, "seed": options.seed, "fit_from": options.fit_from}


def _fit(curve: "Curve", options: argparse.Namespace, asymptote: float | None) -> "FitResult":
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


def _comparison(runs: list["RunReport"], options: argparse.Namespace) -> "Comparison":
    from megatron_scalerl.fit.compare import compare_runs

    fits = {run.curve.name: run.fit for run in runs}

    def fit_curve(curve: "Curve", asymptote: float | None) -> "FitResult":
        return fits[curve.name] if asymptote is None else _fit(curve, options, asymptote)

    curves = [run.curve for run in runs]
    return compare_runs(curves, fit_curve, references=options.reference, pass_rate=options.target)


def _print(runs: list["RunReport"], comparison: "Comparison | None", options: argparse.Namespace) -> None:
    from rich.console import Console

    from megatron_scalerl.fit import tables

    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, markup=False, emoji=False)

    def show(table: tables.Table) -> None:
        console.print(table.rich())

    for each in runs:
        print(each.curve.read)
    show(tables.parameters_table(runs))
    show(tables.predictions_table(runs))
    for each in runs:
        if each.evaluation is not None:
            show(tables.evaluation_table(each.evaluation))
            print(each.evaluation.summary())
    for each in runs:
        if len(runs) > 1:
            print(f"\n{each.fit.name}")
        if each.decision.compute_to_target is not None:
            print(f"{each.decision.target:g} at {tables.estimated_compute(each.decision.compute_to_target)}")
        for warning in each.fit.warnings:
            print(f"warning: {warning}")
        print(f"verdict: {each.decision.sentence()}")
    for test in (each.backtest for each in runs if each.backtest is not None):
        show(tables.backtest_table(test))
        print(test.summary())
    if comparison is not None:
        from megatron_scalerl.fit.verdicts import conclusions, summary

        show(tables.comparison_table(comparison))
        print(*conclusions(comparison), *(summary(comparison, arm) for arm in comparison.arms), sep="\n")


def _draw(runs: list["RunReport"], comparison: "Comparison | None", options: argparse.Namespace) -> None:
    from megatron_scalerl.fit.plot import plot_comparison, plot_forecast

    fits = [run.fit for run in runs]
    computes = [p.compute for run in runs for p in run.predictions] if options.predict else []
    figure: dict[str, Any] = {
        "unseen": {run.fit.name: _not_fitted(run) for run in runs},
        "until": max([2.0 * max(float(run.curve.compute.max()) for run in runs), *computes]),
        "target": options.target,
    }
    if options.plot:
        path = Path(options.plot)
        plot_forecast(path, fits, **figure)
        if path.suffix == ".png":
            plot_forecast(path.with_suffix(".svg"), fits, **figure)
        if comparison is not None:
            plot_comparison(path.with_name(f"{path.stem}_comparison{path.suffix}"), comparison)
    if not options.html:
        return
    from megatron_scalerl.fit.html import write_html

    with tempfile.TemporaryDirectory() as folder:
        scratch, drawn = Path(folder), []
        if comparison is not None:
            drawn.append(
                (plot_comparison(scratch / "comparison.svg", comparison), "A, B and compute of every recipe")
            )
        write_html(
            options.html,
            runs,
            figure=plot_forecast(scratch / "forecast.svg", fits, **figure),
            comparison=comparison,
            comparison_figures=drawn,
        )


def _not_fitted(run: "RunReport") -> "Points":
    import numpy as np

    outside = ~np.isin(run.curve.compute, run.fit.compute)
    return run.curve.compute[outside], run.curve.pass_rate[outside]

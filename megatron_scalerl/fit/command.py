"""The command line of the forecast: `megatron-scalerl fit INPUT... [options]`."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megatron_scalerl.fit.arms import numbered_names
from megatron_scalerl.fit.backtest import backtest
from megatron_scalerl.fit.compare import Comparison, compare_runs
from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.decide import WORTH, decide
from megatron_scalerl.fit.forecast import METHODS, fit_curve
from megatron_scalerl.fit.inputs import ColumnOptions, read_curves
from megatron_scalerl.fit.plot import plot_forecast
from megatron_scalerl.fit.sizes import Ladder, ladder_of
from megatron_scalerl.fit.tables import (
    RunReport,
    comparison_json,
    estimated_compute,
    further_sections,
    html_page,
    run_json,
    sections,
    show,
)

COVERAGE = "in runs of other projects, 89 % of the points after a fitted half lay inside, 82 % after a fitted third"
"""Text for `--help` on how often the intervals contain later points."""
EPILOG = f"""example:
  megatron-scalerl fit runs/my_run --fit-until 8000 --predict 16000,50000 --html report.html

Intervals are nominal 90 % intervals ({COVERAGE}). docs/forecast.md says what to type
for which file, docs/forecast_method.md how the forecast works."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    p.description = "Fit a run's compute-performance curve, forecast it, and decide whether to continue the run."
    p.epilog = EPILOG
    add = p.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="run folder, or file of W&B, TRL, verl, TensorBoard and others")
    add("--compute", metavar="COL", help="column with the compute (or the step)")
    add("--score", metavar="COL", help="column with the pass rate; pass_rate/TASK is the pass rate of one task")
    add("--score-range", metavar="LO,HI", help="scores that count as 0 and 1, such as --score-range=-1,1")
    add(
        "--series",
        metavar="COL=VALUE",
        action="append",
        default=[],
        help="read only rows where COL is VALUE; COL=* reads one run for each value; may be repeated",
    )
    add("--hours-per-step", type=float, metavar="H", help="GPU-hours per step, which turn steps into compute")
    add("--r0", type=float, metavar="X", help="pass rate before RL; default: the run's pass rate at step 0")
    add("--fit-from", type=float, metavar="C", help="leave points before compute C out of the fit")
    add("--fit-until", type=float, metavar="C", help="leave points after compute C out, and draw them hollow")
    add("--predict", metavar="C1,C2,...", help="forecast at each compute; default: 2, 5, 10 times the last fitted")
    add("--method", choices=METHODS, default="robust", help="default: robust")
    add("--prompts", type=int, metavar="N", help="number of prompts in the validation set")
    add("--generations", type=int, metavar="K", help="generations per prompt of a validation")
    add("--json", metavar="OUT|-", help="write JSON; - prints it, and nothing else, to standard output")
    add("--plot", metavar="OUT.png", help="draw a PNG figure, and an SVG figure beside it")
    add("--html", metavar="OUT.html", help="write a report in one self-contained file")
    add("--compare", action="store_true", help="group the runs by recipe and compare the recipes")
    add(
        "--reference",
        metavar="[RECIPE=]NAME",
        action="append",
        default=[],
        help="recipe with which all recipes, or RECIPE alone, are compared; default: the first run's recipe",
    )
    add(
        "--across-sizes",
        metavar="N1,N2,...",
        help="size (parameters) of each run's policy, in any unit: fit the final pass rate by policy size",
    )
    add("--next", type=float, metavar="N", help="policy size for which --across-sizes forecasts the pass rate")
    add("--fixed-asymptote", type=float, metavar="X", help="fix the asymptote A at X")
    add(
        "--budget",
        type=float,
        metavar="C",
        help="further compute for the verdict and for --compare; default: as much as the run has used",
    )
    add("--worth", type=float, metavar="X", default=WORTH, help=f"pass-rate gain worth the budget; default {WORTH:g}")
    add("--target", type=float, metavar="X", help="estimate, and compare, the compute to reach pass rate X")
    add("--backtest", action="store_true", help="forecast the last points from every shorter part of the run")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit runs, print results, write files. Raises ValueError for invalid input, OSError for an unusable path."""
    # matplotlib and jinja2 are imported here, so that a missing package is reported before the fit
    if options.plot or options.html:
        import matplotlib  # noqa: F401
    if options.html:
        import jinja2  # noqa: F401
    runs = [_run_report(curve, options) for curve in _with_unique_names(_read(options))]
    content: dict[str, Any] = {"fits": [run_json(run) for run in runs]}
    comparison = None
    if options.compare:
        comparison = compare_runs(
            [run.curve for run in runs],
            {run.fit.name: run.fit for run in runs},
            references=options.reference,
            pass_rate=options.target,
            budget=options.budget,
        )
        content["comparison"] = comparison_json(comparison)
    ladder = None
    if options.next is not None and not options.across_sizes:
        raise ValueError("--next: requires --across-sizes with the sizes of the given runs")
    if options.across_sizes:
        sizes = _numbers(options.across_sizes, "--across-sizes")
        ladder = ladder_of([run.fit for run in runs], sizes, options.next)
        content["across_sizes"] = asdict(ladder)
    # JSON has no inf and no nan: `tables` writes null for both, and allow_nan=False raises for a number that `tables`
    # missed
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        _print(runs, comparison, ladder, console)
        if options.json:
            _write(options.json, text)
    if options.plot:
        path = _draw(Path(options.plot), runs, options)
        if path.suffix == ".png":
            _draw(path.with_suffix(".svg"), runs, options)
    if options.html:
        with tempfile.TemporaryDirectory() as folder:
            figure = _draw(Path(folder) / "forecast.svg", runs, options)
            _write(options.html, html_page(runs, comparison, figure=figure))
    return 0


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _read(options: argparse.Namespace) -> list[Curve]:
    """Read the curves of all inputs. The options --r0, --prompts and --generations replace values in the files."""
    series = []
    for pair in options.series:
        column, equals, value = pair.partition("=")
        if not equals or not column:
            raise ValueError(f"--series: {pair!r} is not of the form COL=VALUE")
        series.append((column, value))
    score_range = None
    ends = _numbers(options.score_range, "--score-range")
    if ends:
        if len(ends) != 2 or ends[0] >= ends[1]:
            raise ValueError(f"--score-range: {options.score_range!r} is not of the form LO,HI with LO < HI")
        score_range = (ends[0], ends[1])
    columns = ColumnOptions(
        compute=options.compute,
        score=options.score,
        hours_per_step=options.hours_per_step,
        series=tuple(series),
        score_range=score_range,
    )
    overrides = {"initial": options.r0, "prompts": options.prompts, "initial_generations": options.generations}
    # an option that the user does not give is None: the value in the input file stays
    overrides = {key: value for key, value in overrides.items() if value is not None}
    curves = [replace(curve, **overrides) for path in options.inputs for curve in read_curves(path, columns)]
    units = {curve.unit: curve.name for curve in curves}
    if len(units) > 1:
        listed = ", ".join(f"{unit} ({name})" for unit, name in units.items())
        raise ValueError(f"the runs have several units of compute: {listed}; choose one with --compute")
    if options.generations is None:
        return curves
    return [replace(curve, generations=np.full(len(curve.compute), float(options.generations))) for curve in curves]


def _with_unique_names(curves: list[Curve]) -> list[Curve]:
    """If several runs have one name, put the name of the folder that contains each run before the name. Names that
    are still equal get numbers."""
    names = [curve.name for curve in curves]
    for n, name in enumerate(tuple(names)):
        if names.count(name) > 1:
            names[n] = f"{curves[n].source.resolve().parent.name}/{name}"
    return [replace(curve, name=name) for curve, name in zip(curves, numbered_names(names))]


def _run_report(curve: Curve, options: argparse.Namespace) -> RunReport:
    computes = _numbers(options.predict, "--predict")
    if any(value <= 0 for value in computes):
        raise ValueError(f"--predict: every compute of {options.predict!r} has to be greater than 0")
    result = fit_curve(
        curve,
        method=options.method,
        fit_from=options.fit_from,
        fit_until=options.fit_until,
        fixed_asymptote=options.fixed_asymptote,
    )
    later_points = curve.part(curve.compute > (options.fit_until or float("inf")))
    evaluation = None
    if later_points.compute.size:
        evaluation = result.evaluate(
            later_points.compute, later_points.pass_rate, completions=later_points.completions
        )
    backtest_result = None
    if options.backtest:
        backtest_result = backtest(curve, method=options.method, fit_from=options.fit_from)
    return RunReport(
        curve=curve,
        fit=result,
        predictions=tuple(result.predict(computes or [k * float(result.compute.max()) for k in (2, 5, 10)])),
        decision=decide(result, budget=options.budget, worth=options.worth, target=options.target),
        evaluation=evaluation,
        backtest=backtest_result,
    )


def _numbers(text: str | None, option: str) -> list[float]:
    """The numbers, separated by commas, in the value `text` of an option; empty if the option is not given. Raises
    ValueError if a part is not a finite number."""
    if text is None:
        return []
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not np.isfinite(values).all():
        raise ValueError(f"{option}: {text!r} is not a list of finite numbers separated by commas")
    return values


def _print(runs: Sequence[RunReport], comparison: Comparison | None, ladder: Ladder | None, console: Console) -> None:
    show((run.curve.read for run in runs), console)
    for _, items in sections(runs):
        show(items, console)
    for run in runs:
        if len(runs) > 1:
            print(f"\n{run.fit.name}")
        if run.decision.compute_to_target is not None:
            print(f"{run.decision.target:g} at {estimated_compute(run.decision.compute_to_target)}")
        for warning in run.fit.warnings:
            print(f"warning: {warning}")
        print(f"verdict: {run.decision.sentence()}")
    for _, items in further_sections(runs, comparison):
        show(items, console)
    if ladder is not None:
        show(ladder.lines(), console)


def _draw(path: Path, runs: Sequence[RunReport], options: argparse.Namespace) -> Path:
    unseen = {}
    computes = [2.0 * float(run.curve.compute.max()) for run in runs]
    for run in runs:
        # drawn hollow: points after --fit-until, and points before --fit-from, which were not fitted either
        unfitted = run.curve.part(~np.isin(run.curve.compute, run.fit.compute))
        unseen[run.fit.name] = (unfitted.compute, unfitted.pass_rate)
        if options.predict:
            computes += [prediction.compute for prediction in run.predictions]
    fits = [run.fit for run in runs]
    return plot_forecast(path, fits, unseen=unseen, until=max(computes), target=options.target)

"""The command line of the forecast: `megatron-scalerl fit INPUT... [options]`."""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalerl.fit.backtest import Backtest
    from megatron_scalerl.fit.compare import Comparison
    from megatron_scalerl.fit.decide import Decision
    from megatron_scalerl.fit.html import RunReport
    from megatron_scalerl.fit.inputs import Curve
    from megatron_scalerl.fit.result import Array, FitResult, Prediction

BACKTEST_PREFIXES = 20
"""Prefixes in the report's back-test; --backtest prints all."""


EPILOG = """example:
  megatron-scalerl fit runs/my_run --fit-until 8000 --predict 16000,50000 --html report.html

Every interval has a coverage of 90 %. docs/forecast.md describes the methods and how to read the plots."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    p.description = "Fit a run's compute-performance curve, forecast it, and decide whether to continue the run."
    p.epilog = EPILOG
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="run folder, or CSV, JSONL or JSON file")
    p.add_argument("--compute", metavar="COL", help="column with the compute (or the step)")
    p.add_argument("--score", metavar="COL", help="column with the pass rate")
    p.add_argument(
        "--series",
        metavar="COL=VALUE",
        action="append",
        default=[],
        help="only rows where COL is VALUE; may be repeated; VALUE * makes one run of each value",
    )
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
    p.add_argument("--compare", action="store_true", help="compare the runs with the first one")
    p.add_argument("--reference", metavar="NAME", help="run that the others are compared with; default: the first")
    p.add_argument("--fixed-asymptote", type=float, metavar="X", help="hold A at X")
    p.add_argument("--budget", type=float, metavar="C", help="further compute to judge; default: as much again")
    p.add_argument("--worth", type=float, metavar="X", help="gain that the budget has to buy; default 0.01")
    p.add_argument("--target", type=float, metavar="X", help="pass rate whose compute is wanted")
    p.add_argument("--backtest", action="store_true", help="refit at every prefix of the run")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the intervals; default 0")


def run(options: argparse.Namespace, console: Console) -> int:
    """Fit, print and write. Raises ValueError for bad input, OSError for a path that cannot be read or written."""
    if options.plot or options.html:
        importlib.import_module("matplotlib")  # a missing one is said before the work, not after it
    from megatron_scalerl.fit import text
    from megatron_scalerl.fit.decide import WORTH, decide

    curves = _reference_first(_named_apart(_read(options)), options.reference)
    fits = [_fit(curve, options) for curve in curves]
    asked = _computes(options.predict)
    predictions = [f.predict(asked or [k * float(f.compute.max()) for k in (2, 5, 10)]) for f in fits]
    worth = WORTH if options.worth is None else options.worth
    decisions = [decide(f, budget=options.budget, worth=worth, target=options.target) for f in fits]
    comparison = _comparison(curves, fits, options) if options.compare else None
    out: dict[str, Any] = {"fits": [text.fit_json(*row) for row in zip(fits, predictions, decisions)]}
    if comparison is not None:
        out["comparison"] = text.comparison_json(comparison)
    if options.json == "-":
        print(json.dumps(out, indent=2, allow_nan=False))
    else:
        _print(curves, fits, predictions, decisions, comparison, options)
        if options.json:
            _write_json(Path(options.json), out)
    if options.plot or options.html:
        _draw(curves, fits, predictions, decisions, comparison, options)
    return 0


def _read(options: argparse.Namespace) -> list["Curve"]:
    from megatron_scalerl.fit.inputs import Choice, read_curves

    series = []
    for pair in options.series:
        column, equals, value = pair.partition("=")
        if not equals or not column:
            raise ValueError(f"--series: expected COL=VALUE, found {pair!r}")
        series.append((column, value))
    choice = Choice(
        compute=options.compute,
        score=options.score,
        series=tuple(series),
        hours_per_step=options.hours_per_step,
    )
    return [curve for path in options.inputs for curve in read_curves(path, choice)]


def _named_apart(curves: list["Curve"]) -> list["Curve"]:
    """Two runs of one name get their folder's name in front, or a number."""
    from dataclasses import replace

    names = [c.name for c in curves]
    out = []
    for index, curve in enumerate(curves):
        name = curve.name
        if names.count(name) > 1:
            parents = [c.source.resolve().parent.name for c in curves if c.name == name]
            here = curve.source.resolve().parent.name
            name = f"{here}/{name}" if parents.count(here) == 1 else f"{name} ({names[: index + 1].count(name)})"
        out.append(replace(curve, name=name))
    return out


def _reference_first(curves: list["Curve"], name: str | None) -> list["Curve"]:
    names = [curve.name for curve in curves]
    if name is not None and name not in names:
        raise ValueError(f"--reference: expected one of {', '.join(names)}, found {name!r}")
    return sorted(curves, key=lambda curve: name is not None and curve.name != name)


def _fit(curve: "Curve", options: argparse.Namespace, fixed_asymptote: float | None = None) -> "FitResult":
    from dataclasses import replace

    from megatron_scalerl.fit.forecast import fit

    try:
        result = fit(
            curve.compute,
            curve.pass_rate,
            initial=options.r0 if options.r0 is not None else curve.initial,
            method=options.method,
            prompts=options.prompts if options.prompts is not None else curve.prompts,
            generations=options.generations if options.generations is not None else curve.generations,
            seed=options.seed,
            name=curve.name,
            unit=curve.unit,
            fit_from=options.fit_from,
            fit_until=options.fit_until,
            fixed_asymptote=options.fixed_asymptote if fixed_asymptote is None else fixed_asymptote,
            truncated_share=curve.truncated_share,
        )
    except ValueError as error:
        raise ValueError(f"{curve.source}: {error}") from None
    return replace(result, warnings=(*curve.notes, *result.warnings))


def _computes(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--predict: expected computes like 16000,50000, found {text!r}") from None
    if not values or not all(0 < value < float("inf") for value in values):
        raise ValueError(f"--predict: expected computes > 0, found {text!r}")
    return values


def _comparison(curves: list["Curve"], fits: list["FitResult"], options: argparse.Namespace) -> "Comparison":
    from megatron_scalerl.fit.compare import compare

    by_name = {curve.name: curve for curve in curves}
    return compare(fits, lambda f, a: _fit(by_name[f.name], options, fixed_asymptote=a), pass_rate=options.target)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _print(
    curves: list["Curve"],
    fits: list["FitResult"],
    predictions: list[list["Prediction"]],
    decisions: list["Decision"],
    comparison: "Comparison | None",
    options: argparse.Namespace,
) -> None:
    from megatron_scalerl.fit import text

    print(text.parameters_table(fits), end="\n\n")
    for curve, f, forecast, decision in zip(curves, fits, predictions, decisions):
        print(text.predictions_table(f.name, forecast, f.unit))
        unseen = _unseen(curve, options)
        if unseen is not None and len(unseen[0]):
            print(text.unseen_table(f, *unseen))
        print(f"95 % of A at {text.reach(decision.to_asymptote)}")
        if decision.to_target is not None:
            print(f"{decision.target:g} at {text.reach(decision.to_target)}")
        for warning in f.warnings:
            print(f"warning: {warning}")
        print(f"verdict: {decision.sentence()}", end="\n\n")
    if options.backtest:
        for curve in curves:
            test = _backtest(curve, options, most=None)
            print(text.backtest_table(test), text.settled_sentence(test), sep="\n", end="\n\n")
    if comparison is not None:
        print(text.comparison_table(comparison), *comparison.sentences(), sep="\n")


def _backtest(curve: "Curve", options: argparse.Namespace, most: int | None) -> "Backtest":
    from dataclasses import replace

    from megatron_scalerl.fit.backtest import backtest

    sized = replace(
        curve,
        prompts=options.prompts if options.prompts is not None else curve.prompts,
        generations=options.generations if options.generations is not None else curve.generations,
    )
    initial = options.r0 if options.r0 is not None else curve.initial
    return backtest(
        sized, initial=initial, method=options.method, most=most, fit_from=options.fit_from, seed=options.seed
    )


def _draw(
    curves: list["Curve"],
    fits: list["FitResult"],
    predictions: list[list["Prediction"]],
    decisions: list["Decision"],
    comparison: "Comparison | None",
    options: argparse.Namespace,
) -> None:
    from megatron_scalerl.fit.html import Report, write_html
    from megatron_scalerl.fit.plot import plot_forecast
    from megatron_scalerl.fit.plot_more import plot_efficiency

    unseen = {c.name: _not_fitted(c, f) for c, f in zip(curves, fits)}
    computes = [p.compute for row in predictions for p in row] if options.predict else []
    until = max([2.0 * max(float(c.compute.max()) for c in curves), *computes])
    figure = {"unseen": unseen, "until": until, "target": options.target}
    if options.plot:
        path = Path(options.plot)
        plot_forecast(path, fits, **figure)
        if path.suffix == ".png":
            plot_forecast(path.with_suffix(".svg"), fits, **figure)
        if comparison is not None:
            plot_efficiency(path.with_name(f"{path.stem}_efficiency{path.suffix}"), comparison)
    if not options.html:
        return
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        efficiency = None if comparison is None else plot_efficiency(scratch / "efficiency.svg", comparison)
        runs = [
            _run_report(scratch / f"backtest{n}.svg", c, f, p, d, options)
            for n, (c, f, p, d) in enumerate(zip(curves, fits, predictions, decisions))
        ]
        title = f"Forecast of {fits[0].name}" if len(fits) == 1 else f"Forecast of {len(fits)} runs"
        report = Report(
            title=title,
            runs=runs,
            figure=plot_forecast(scratch / "forecast.svg", fits, **figure),
            comparison=comparison,
            efficiency_figure=efficiency,
            sources=list(dict.fromkeys(c.source.name for c in curves)),
        )
        write_html(options.html, report)


def _unseen(curve: "Curve", options: argparse.Namespace) -> "tuple[Array, Array] | None":
    if options.fit_until is None:
        return None
    later = curve.compute > options.fit_until
    return curve.compute[later], curve.pass_rate[later]


def _not_fitted(curve: "Curve", fit_result: "FitResult") -> "tuple[Array, Array]":
    import numpy as np

    outside = ~np.isin(curve.compute, fit_result.compute)
    return curve.compute[outside], curve.pass_rate[outside]


def _run_report(
    path: Path,
    curve: "Curve",
    fit_result: "FitResult",
    predictions: list["Prediction"],
    decision: "Decision",
    options: argparse.Namespace,
) -> "RunReport":
    from megatron_scalerl.fit.backtest import LEAST_POINTS
    from megatron_scalerl.fit.forms import compare_forms
    from megatron_scalerl.fit.html import RunReport
    from megatron_scalerl.fit.plot_more import plot_backtest
    from megatron_scalerl.fit.text import settled_sentence

    figure, words = None, ""
    if len(curve.compute) > LEAST_POINTS + 1:
        test = _backtest(curve, options, most=BACKTEST_PREFIXES)
        figure, words = plot_backtest(path, test, unit=curve.unit), settled_sentence(test)
    enough = fit_result.n_points >= 6
    forms = compare_forms(fit_result.compute, fit_result.pass_rate, initial=fit_result.initial) if enough else ()
    return RunReport(
        fit=fit_result,
        predictions=predictions,
        decision=decision,
        forms=forms,
        backtest_figure=figure,
        backtest_words=words,
    )

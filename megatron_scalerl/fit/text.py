"""A fit, a decision and a comparison as plain text for the terminal, and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_scalerl.fit.backtest import Backtest
from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.decide import Decision, Estimate
from megatron_scalerl.fit.result import FitResult, Prediction
from megatron_scalerl.fit.sigmoid import Array
from megatron_scalerl.fit.wording import short_number, unit_name


def fit_json(fit: FitResult, predictions: Sequence[Prediction], decision: Decision) -> dict[str, Any]:
    """One entry of the JSON's `fits`. Infinite computes become null: JSON has no infinity."""
    return {
        "name": fit.name,
        "method": fit.method,
        "asymptote": fit.asymptote,
        "exponent": fit.exponent,
        "midpoint": fit.midpoint,
        "initial": fit.initial,
        "intervals": {key: list(pair) for key, pair in fit.intervals.items()},
        "n_points": fit.n_points,
        "rmse": fit.rmse,
        "predictions": [
            {"compute": p.compute, "pass_rate": p.pass_rate, "lo": p.lo, "hi": p.hi} for p in predictions
        ],
        "warnings": list(fit.warnings),
        "verdict": decision.sentence(),
        "unit": fit.unit,
        "decision": decision_json(decision),
    }


def decision_json(decision: Decision) -> dict[str, Any]:
    """The numbers behind a verdict."""
    return {
        "verdict": decision.verdict,
        "reason": decision.reason,
        "now": decision.now,
        "budget": decision.budget,
        "gain": _estimate_json(decision.gain),
        "gain_per_unit": _estimate_json(decision.gain_per_unit),
        "worth": decision.worth,
        "probability": decision.probability,
        "compute_to_95_percent_of_asymptote": _estimate_json(decision.to_asymptote),
        "target": decision.target,
        "compute_to_target": None if decision.to_target is None else _estimate_json(decision.to_target),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison table as JSON values."""
    return {
        "fixed_asymptote": comparison.fixed_asymptote,
        "pass_rate": comparison.pass_rate,
        "runs": [
            {
                "name": c.fit.name,
                "asymptote": c.fit.asymptote,
                "exponent": c.fit.exponent,
                "midpoint": c.fit.midpoint,
                "same_ceiling": c.same_ceiling,
                "exponent_at_fixed_asymptote": None if c.refit is None else c.refit.exponent,
                "probability_of_higher_exponent": None if math.isnan(c.better_exponent) else c.better_exponent,
                "compute_to_pass_rate": _estimate_json(c.to_reach),
                "words": c.words,
            }
            for c in comparison.contenders
        ],
    }


def _estimate_json(estimate: Estimate) -> dict[str, float | None]:
    return {
        key: value if math.isfinite(value) else None
        for key, value in (("value", estimate.value), ("lo", estimate.lo), ("hi", estimate.hi))
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one to the left and the others to the right."""
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(cells, widths)))
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def parameters_table(fits: Sequence[FitResult]) -> str:
    """A, B, C_mid with their 90 % intervals, one run a line."""
    rows = [
        [
            f.name,
            spread(f.asymptote, f.intervals["asymptote"], "{:.3f}"),
            spread(f.exponent, f.intervals["exponent"], "{:.2f}"),
            spread(f.midpoint, f.intervals["midpoint"], None),
            f"{f.initial:.3f}",
            str(f.n_points),
            f"{f.rmse:.4f}",
        ]
        for f in fits
    ]
    return table(["run", "A", "B", "C_mid", "R_0", "points", "rmse"], rows)


def spread(value: float, interval: tuple[float, float], style: str | None) -> str:
    """A value with its interval: `0.636 [0.620, 0.656]`."""
    say = short_number if style is None else style.format
    return f"{say(value)} [{say(interval[0])}, {say(interval[1])}]"


def predictions_table(name: str, predictions: Sequence[Prediction], unit: str) -> str:
    """Forecast pass rates of one run with the interval of a measured point."""
    rows = [[short_number(p.compute), f"{p.pass_rate:.4f}", f"[{p.lo:.4f}, {p.hi:.4f}]"] for p in predictions]
    return table([f"{name}, {unit_name(unit)}", "pass rate", "90 % interval"], rows)


def unseen_table(fit: FitResult, compute: Array, pass_rate: Array) -> str:
    """Forecast against measurement for points that were left out of the fit."""
    forecast = fit.predict(compute)
    rows = [
        [
            short_number(p.compute),
            f"{p.pass_rate:.4f}",
            f"[{p.lo:.4f}, {p.hi:.4f}]",
            f"{measured:.4f}",
            f"{measured - p.pass_rate:+.4f}" + ("" if p.lo <= measured <= p.hi else " !"),
        ]
        for p, measured in zip(forecast, pass_rate)
    ]
    error = sum(abs(y - p.pass_rate) for p, y in zip(forecast, pass_rate)) / len(rows)
    inside = sum(p.lo <= y <= p.hi for p, y in zip(forecast, pass_rate))
    header = [f"{fit.name}, not fitted", "forecast", "90 % interval", "measured", "difference"]
    return (
        table(header, rows)
        + f"\nmean absolute error {error:.4f}; {inside} of {len(rows)} measurements inside their interval"
    )


def comparison_table(comparison: Comparison) -> str:
    """The leave-one-out table of Khatri et al. (2025), Fig. 4, for these runs."""
    rows = [
        [
            c.fit.name,
            short_number(c.fit.midpoint),
            f"{c.fit.exponent:.2f}",
            f"{c.fit.asymptote:.3f}",
            "-" if c.refit is None else f"{c.refit.exponent:.2f}",
            reach(c.to_reach),
        ]
        for c in comparison.contenders
    ]
    header = [
        "run",
        "C_mid",
        "B",
        "A",
        f"B at A = {comparison.fixed_asymptote:.3f}",
        f"compute to {comparison.pass_rate:.3f}",
    ]
    return table(header, rows)


def reach(estimate: Estimate) -> str:
    """Compute with interval, or `never`."""

    def say(value: float) -> str:
        return short_number(value) if math.isfinite(value) else "never"

    return f"{say(estimate.value)} [{say(estimate.lo)}, {say(estimate.hi)}]"


def backtest_table(test: Backtest) -> str:
    """The forecast of the last point from every prefix."""
    rows = [
        [
            short_number(h.compute),
            str(h.n_points),
            f"{h.forecast:.4f}",
            f"[{h.lo:.4f}, {h.hi:.4f}]",
            f"{h.forecast - test.final_pass_rate:+.4f}",
            f"{h.asymptote:.3f}",
        ]
        for h in test.history
    ]
    return table(["fitted up to", "points", "forecast", "90 % interval", "error", "A"], rows)


def settled_sentence(test: Backtest) -> str:
    """From where on the forecast held."""
    measured = f"{test.final_pass_rate:.4f} at {short_number(test.final_compute)}"
    if test.settled_from is None:
        return f"{test.name}: the forecast of the last point ({measured}) never settled within {test.margin:g}."
    return (
        f"{test.name}: from {short_number(test.settled_from)} on, the forecast of the last point ({measured}) "
        f"stayed within {test.margin:g}."
    )

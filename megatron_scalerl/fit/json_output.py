"""Fits, decisions and comparisons as JSON values. Infinite computes become null: JSON has no infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.decide import Decision, Estimate
from megatron_scalerl.fit.result import FitResult, Prediction


def fit_json(fit: FitResult, predictions: Sequence[Prediction], decision: Decision) -> dict[str, Any]:
    """One entry of the JSON's `fits`."""
    return {
        "name": fit.name,
        "method": fit.method,
        **fit.parameters,
        "intervals": {key: list(pair) for key, pair in fit.intervals.items()},
        "n_points": fit.n_points,
        "rmse": fit.rmse,
        "predictions": [asdict(prediction) for prediction in predictions],
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
    """The comparison table."""
    return {
        "fixed_asymptote": comparison.fixed_asymptote,
        "pass_rate": comparison.pass_rate,
        "runs": [
            {
                "name": run.fit.name,
                "asymptote": run.fit.asymptote,
                "exponent": run.fit.exponent,
                "midpoint": run.fit.midpoint,
                "same_ceiling": run.same_ceiling,
                "exponent_at_fixed_asymptote": None if run.refit is None else run.refit.exponent,
                "probability_of_higher_exponent": None if math.isnan(run.better_exponent) else run.better_exponent,
                "compute_to_pass_rate": _estimate_json(run.to_reach),
                "summary": run.summary,
            }
            for run in comparison.runs
        ],
    }


def _estimate_json(estimate: Estimate) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(estimate).items()}

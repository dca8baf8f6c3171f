"""Fits, decisions and comparisons as JSON values. JSON has no inf and nan: they become null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_scalerl.fit.compare import Comparison
from megatron_scalerl.fit.decide import Decision
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
        "decision": _finite(asdict(decision)),
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
                "probability_of_higher_exponent": _finite(run.better_exponent),
                "compute_to_pass_rate": _finite(asdict(run.to_reach)),
                "summary": run.summary,
            }
            for run in comparison.runs
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Fits, decisions and comparisons as JSON values. JSON has no inf and nan: they become null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_scalerl.fit.compare import ComparedArm, Comparison
from megatron_scalerl.fit.decide import Decision
from megatron_scalerl.fit.result import FitResult, Prediction
from megatron_scalerl.fit.verdicts import conclusions, summary


def fit_json(fit: FitResult, predictions: Sequence[Prediction], decision: Decision) -> dict[str, Any]:
    """One entry of the JSON's `fits`."""
    return {
        **{key: getattr(fit, key) for key in ("name", "method", "n_points", "rmse", "unit")},
        **fit.parameters,
        "intervals": {key: list(pair) for key, pair in fit.intervals.items()},
        "predictions": [asdict(prediction) for prediction in predictions],
        "warnings": list(fit.warnings),
        "verdict": decision.sentence(),
        "decision": _finite(asdict(decision)),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison: its arms with intervals, their runs, and what it says in words."""
    return {
        **{k: _finite(getattr(comparison, k)) for k in ("fixed_asymptote", "pass_rate", "between_runs", "paired")},
        "conclusions": conclusions(comparison),
        "arms": [_arm_json(comparison, arm) for arm in comparison.arms],
    }


def _arm_json(comparison: Comparison, arm: ComparedArm) -> dict[str, Any]:
    numbers = ("measured", "asymptote", "exponent", "midpoint", "fixed_exponent", "to_reach")
    differences = ("ceiling", "efficiency")
    refits = arm.refits or (None,) * arm.runs
    return {
        "name": arm.name,
        "reference": arm.reference,
        **{key: _finite(asdict(each)) if (each := getattr(arm, key)) else None for key in numbers + differences},
        "runs": [
            {
                "name": fit.name,
                "seed": seed,
                **fit.parameters,
                "exponent_at_fixed_asymptote": None if again is None else again.exponent,
                "last_measured": float(fit.pass_rate[-1]),
                "warnings": list(fit.warnings),
            }
            for fit, seed, again in zip(arm.fits, arm.seeds, refits)
        ],
        "summary": summary(comparison, arm),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

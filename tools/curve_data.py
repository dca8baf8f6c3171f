"""What a run of the collection ships: its points, its training batches and its recipe differences, as one object.

The compute axis is counted, not timed: model FLOPs, 2 N for each generated token and 6 N for each token of an
optimizer step (N: parameters of the matrix products). It does not depend on the machine or on what else runs there.
The counts are in the object as well, for any other cost model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.jsonl import read_jsonl

GENERATED, TRAINED = 2.0, 6.0
"""FLOPs per parameter and token: forward; forward and backward."""
TRAINING = {
    "pass_rate": "train_pass_rate",
    "within_variance": "train_within_variance",
    "completions": "train_completions",
    "groups": "batch/groups",
    "groups_kept": "batch/groups_kept",
    "staleness": "staleness_mean",
    "skipped_prompts": "prompts_skipped",
    "completion_tokens": "completion_tokens_mean",
    "trained_tokens": "tokens",
}
"""Column of the shipped training batches -> column of metrics.jsonl."""
VALIDATION = (
    "step",
    "pass_rate",
    "generations",
    "within_variance",
    "truncated_share",
    "mean_completion_tokens",
    "entropy",
)
"""Columns of validation.jsonl that are shipped as they are."""


def matmul_parameters(policy: Path) -> int:
    """Parameters of a Llama policy's matrix products: all but the embedding and the norms. Raises OSError."""
    c = json.loads((policy / "config.json").read_text(encoding="utf8"))
    hidden, heads = c["hidden_size"], c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    return c["num_hidden_layers"] * hidden * (heads + 3 * c["intermediate_size"]) + hidden * c["vocab_size"]


def tera_flops(batches: Iterable[Mapping[str, Any]], parameters: int) -> dict[int, float]:
    """Optimizer step -> TFLOPs of the run up to it, from the rows of metrics.jsonl; 0.0 at step 0.

    A batch's completions count when it is trained, discarded ones not at all. A batch that nothing was left of made
    no step: its completions count at the next one.
    """
    total, found = 0.0, {0: 0.0}
    for row in batches:
        total += GENERATED * row["completion_tokens_mean"] * row["train_completions"] + TRAINED * row.get(
            "tokens", 0.0
        )
        if "skipped" not in row:
            found[row["step"]] = total * parameters * 1e-12
    return found


def packed(outcomes: str) -> str | None:
    """Outcomes as hexadecimal digits, the first one the highest bit; None if a completion was lost."""
    if "-" in outcomes or not outcomes:
        return None
    return f"{int(outcomes, 2):0{-(-len(outcomes) // 4)}x}"


def run_data(run: Path, parameters: int) -> dict[str, Any]:
    """The points and training batches of a finished run's folder. Raises ValueError if its records are incomplete."""
    validations = {row["step"]: row for row in read_jsonl(run / "validation.jsonl")}
    outcomes = {row["step"]: row["outcomes"] for row in read_jsonl(run / "validation_by_prompt.jsonl")}
    batches = read_jsonl(run / "metrics.jsonl")
    compute = tera_flops(batches, parameters)
    if missing := [step for step in validations if step not in compute]:
        raise ValueError(f"{run}/metrics.jsonl: expected a row of step {missing[0]}, which is validated, found none")
    if 0 not in validations:
        raise ValueError(f"{run}/validation.jsonl: expected a row of step 0, found {sorted(validations)}")
    rows = [validations[step] for step in sorted(validations)]
    return {
        "parameters": parameters,
        "unit": "tflops",
        "prompts": rows[0]["prompts"],
        "validations": {
            "compute": [_short(compute[row["step"]]) for row in rows],
            "device_hours": [_short(row["compute"]) for row in rows],
            **{column: [_short(row[column]) for row in rows] for column in VALIDATION},
            "outcomes": [packed(outcomes[row["step"]]) for row in rows],
        },
        "training": _training(batches),
    }


def _training(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """One value per batch; `step` is that of the policy after it."""
    columns = {"step": "step"} | TRAINING
    return {name: [_short(row.get(column)) for row in batches] for name, column in columns.items()}


def _short(value: float | int | None) -> float | int | None:
    """Six significant digits; a whole number as an integer."""
    if value is None or isinstance(value, int):
        return value
    return int(value) if value == int(value) else float(f"{value:.6g}")

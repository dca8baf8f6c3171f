"""A synthetic run, and its report."""

import io
import json

import numpy as np
from rich.console import Console

from megatron_scalerl.fit.sigmoid import sigmoid
from megatron_scalerl.page.report import report

HOURS = np.linspace(0.02, 0.4, 20)


CURVE = sigmoid(HOURS, asymptote=0.8, exponent=1.8, midpoint=0.08, initial=0.4)


def write_run(folder, *, steps=20, noise=0.0):
    rng = np.random.default_rng(3)
    values = [0.4, *(CURVE + noise * rng.standard_normal(len(CURVE)))][: steps + 1]
    with open(folder / "validation.jsonl", "w") as rows, open(folder / "validation_by_prompt.jsonl", "w") as prompts:
        for number, value in enumerate(values):
            hours = 0.0 if number == 0 else float(HOURS[number - 1])
            row = {
                "step": 5 * number,
                "policy_version": 5 * number,
                "pass_rate": float(value),
                "pass_rate/sums": 0.75,
                "prompts": 200,
                "generations": 4,
                "compute": hours,
                "compute_total": hours * 1.2,
                "unit": "device_hours",
                "truncated_share": 0.0,
                "interrupted_share": 0.05,
                "mean_completion_tokens": 25.0,
            }
            rows.write(json.dumps(row) + "\n")
            prompts.write(json.dumps({"step": 5 * number, "by_prompt": [float(value)] * 100 + [0.5] * 100}) + "\n")
    (folder / "ledger.jsonl").write_text(
        '{"unit": "device_hours"}\n'
        '{"step": 1, "role": "trainer", "hours": 3.0}\n{"step": 1, "role": "engine", "hours": 1.0}\n'
    )
    (folder / "recipe.yaml").write_text("name: r\nforecast: {fit_from_steps: 0, fit_until_share: 0.5}\n")


def printed_report(folder):
    """What `megatron-scalerl report` prints of a run."""
    console = Console(file=io.StringIO(), markup=False, width=200)
    report(folder, console)
    return console.file.getvalue()

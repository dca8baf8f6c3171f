"""A forecast that is written down before the end."""

import hashlib
import json
import sys

from json_lines import lines
from programs import ended, printed

from megatron_scalerl.fit.outlook import outlook


def test_the_forecast_of_the_validations_so_far_is_appended(tmp_path):
    run = tmp_path / "my_run"
    run.mkdir()
    rows = [
        {
            "step": step,
            "compute": step / 100,
            "pass_rate": 0.2 + 0.3 * step / (step + 10),
            "prompts": 100,
            "generations": 1,
        }
        for step in range(0, 32, 4)
    ]
    text = lines(rows)
    (run / "validation.jsonl").write_text(text)
    (run / "recipe.yaml").write_text("forecast: {fit_from_steps: 4}\n")
    out = tmp_path / "forecasts.jsonl"
    out.write_text(json.dumps({"run": "another", "step": 60}) + "\n")
    command = [sys.executable, "tools/record_forecast.py", run, "--steps", "60", "--out", out]
    said = printed(*command)
    again = ended(*command)
    assert again.returncode == 1 and "the first one stands" in again.stderr
    first, last = out.read_text().splitlines()
    made = outlook(rows, steps=60, fit_from_steps=4)
    recorded = json.loads(last)
    assert "another" in first and made.line() in said
    assert recorded["run"] == "my_run" and len(recorded["commit"]) == 40
    assert recorded["validations_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert (recorded["at_step"], recorded["step"]) == (28, 60)
    assert recorded["lo"] < recorded["pass_rate"] == round(made.pass_rate, 4) < recorded["hi"]

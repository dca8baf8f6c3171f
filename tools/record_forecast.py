"""Appends a run's forecast of its own end to a file of forecasts, before the end comes.

    python tools/record_forecast.py RUN --steps N --out forecasts.jsonl

The line has the sha256 of the validations that were used, so that a reader can see that no later one was among them.
"""

import argparse
import hashlib
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from checkout import explained

with explained():
    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.fit.outlook import outlook
    from megatron_scalerl.recipe.file import read_run_recipe


def parser():
    built = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    built.add_argument("run", type=Path, metavar="RUN")
    built.add_argument("--steps", type=int, required=True, metavar="N", help="steps of the whole run")
    built.add_argument("--out", type=Path, required=True, metavar="FILE")
    return built


def main(run, steps, out):
    validations = run / "validation.jsonl"
    if out.exists() and any((line["run"], line["step"]) == (run.name, steps) for line in read_jsonl(out)):
        raise SystemExit(f"{out} has a forecast of {run.name} for step {steps}; the first one stands")
    first = read_run_recipe(run)["forecast"]["fit_from_steps"]
    made = outlook(list(read_jsonl(validations)), steps=steps, fit_from_steps=first)
    if made is None:
        raise SystemExit(f"{validations} has too few validations for a forecast, or that of step {steps}")
    line = {
        "run": run.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "validations_sha256": hashlib.sha256(validations.read_bytes()).hexdigest(),
        "at_step": made.step,
        "step": made.end_step,
        "pass_rate": round(made.pass_rate, 4),
        "lo": round(made.lo, 4),
        "hi": round(made.hi, 4),
    }
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{out}: {made.line()}")


if __name__ == "__main__":
    main(**vars(parser().parse_args()))

"""Stands in for `megatron-scalerl train RECIPE`: writes the files of a run in a fraction of a second, no policy.

Every step is one line of metrics.jsonl; every second step is saved. environment: STAND_IN_FAILS names runs that fail
at step 3. STAND_IN_STOPS, as RUN:STEP, makes no step after that one until a signal ends it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from megatron_scalerl.fit.sigmoid import sigmoid


def wait(name, step):
    """After a step: as the environment says. Ten minutes later it goes on, if the test was killed."""
    end = time.monotonic() + 600
    while time.monotonic() < end and os.environ.get("STAND_IN_STOPS") == f"{name}:{step}":
        time.sleep(0.02)


def main():
    """Make the steps that are left."""
    recipe = yaml.safe_load(Path(sys.argv[-1]).read_text())
    folder = Path(recipe["output_dir"]) / recipe["name"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(Path(sys.argv[-1]).read_text())
    with open(folder / "starts", "a") as starts:
        starts.write("x")
    saved = sorted((folder / "checkpoints").glob("step_*"))
    begin = int(saved[-1].name.split("_")[1]) if saved else 0
    print(f"the stand-in begins at step {begin}", flush=True)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    dapo = recipe["loss"]["name"] == "dapo"
    rng = np.random.default_rng([recipe["seed"], dapo])
    curve = {"asymptote": (0.6 if dapo else 0.8) + rng.normal(0, 0.005), "exponent": 2.0, "midpoint": 4.0}
    (folder / "ledger.jsonl").write_text('{"unit": "device_hours"}\n')
    wait(recipe["name"], begin)
    for step in range(begin + 1, recipe["steps"] + 1):
        if step == 3 and recipe["name"] in os.environ.get("STAND_IN_FAILS", "").split():
            print("RuntimeError: the stand-in fails", flush=True)
            return 1
        with open(folder / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps({"step": step}) + "\n")
        if step % 2 == 0:
            checkpoint = folder / f"checkpoints/step_{step:06d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "COMMIT").write_text("{}")
        wait(recipe["name"], step)
    size = {"prompts": 400, "generations": 8}
    rows = [{"step": 0, "pass_rate": 0.4, "compute": 0.0, **size}]
    for step in range(1, recipe["steps"] + 1):
        rate = float(sigmoid(float(step), initial=0.4, **curve) + rng.normal(0, 0.003))
        rows.append({"step": step, "pass_rate": rate, "compute": float(step), **size})
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "end.json").write_text(json.dumps({"reason": "all steps are made", "step": recipe["steps"]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Optimiser steps per hour of PipelineRL-8 over those of synchronous training, on the same policy and machine.

    python tools/bench_async.py [--tiny runs/tiny_1] [--steps 16] [--rounds 2]

Complete runs of recipes/tiny_cpu.yaml without validations, with real trainer, engine and weight updates. k = 0 runs
with each thread setting and the best one counts, k = 8 with one thread per process. Runs take turns. The figure of a
run is the median time between two steps after the first `skip` ones. `--tiny` is a folder with a warm policy, as
examples/quickstart.sh makes it. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

from checkout import explained
from tiny_run import tiny_run

K8 = {"k": 8, "trainer": 1, "engine": 1}
K0 = ({"k": 0, "trainer": 1, "engine": 1}, {"k": 0, "trainer": 2, "engine": 2}, {"k": 0, "trainer": 2, "engine": 1})


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", default="runs/tiny_1")
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--skip", type=int, default=6, help="steps left out: the pipeline fills")
    p.add_argument("--rounds", type=int, default=2)
    return p


def main() -> None:
    """Measure and print."""
    a = parser().parse_args()
    if not Path(a.tiny, "policy", "config.json").is_file():
        message = f"--tiny: expected a folder with a warm policy, found {a.tiny}; run examples/quickstart.sh"
        parser().exit(2, f"{message}\n")
    settings = (K8, *K0)
    seconds: list[list[float]] = [[] for _ in settings]
    for _ in range(a.rounds):
        for times, setting in zip(seconds, settings):
            times.append(step_seconds(Path(a.tiny), setting, a.steps, a.skip))
    per_hour = [3600 / statistics.median(times) for times in seconds]
    best = max(range(1, len(settings)), key=per_hour.__getitem__)
    print(
        json.dumps(
            {
                "bench": "async",
                "ratio": round(per_hour[0] / per_hour[best], 3),
                "target": 1.15,
                "k8_steps_per_hour": round(per_hour[0], 1),
                "k0_steps_per_hour": {_name(s): round(v, 1) for s, v in zip(settings[1:], per_hour[1:])},
                "k0_best": _name(settings[best]),
                "runs": {_name(s): [round(t, 3) for t in times] for s, times in zip(settings, seconds)},
                "steps": a.steps,
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "load_average": os.getloadavg()[0],
            }
        )
    )


def _name(setting: dict[str, int]) -> str:
    return f"k{setting['k']}, threads: trainer {setting['trainer']}, engine {setting['engine']}"


def step_seconds(tiny: Path, setting: dict[str, int], steps: int, skip: int) -> float:
    """Median seconds between two steps of one run."""
    overrides = (
        f"rollouts.max_staleness_steps={setting['k']}",
        f"trainer.threads={setting['trainer']}",
        f"engine.threads={setting['engine']}",
    )
    with tiny_run(tiny, steps, *overrides) as run:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_seconds"] for row in rows[skip:])


if __name__ == "__main__":
    with explained():
        main()

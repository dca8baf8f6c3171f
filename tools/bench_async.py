"""Optimizer steps per hour of PipelineRL-8 over those of synchronous training, on the same policy and machine.

    python tools/bench_async.py [--tiny runs/tiny_1] [--steps 16] [--rounds 5] [--out runs/bench_async.jsonl]

Complete runs of recipes/tiny_cpu.yaml without validations, with real trainer, engine and weight updates. k = 0 runs
with each thread setting, k = 8 with one thread per process. `--tiny` is a folder with a warm policy, as
examples/quickstart.sh makes it.

For a machine with other work on it: a round has one run of each arm, each round begins with another arm, and the
figure is the median over rounds of the ratio within a round, to the k = 0 setting with the best median. A run's own
figure is the median time between two steps after the first `skip` ones. Every run is appended to --out, and runs that
are there are not repeated: the same command goes on where it was stopped, and more --rounds add to it. Prints one
JSON line with medians, quartiles and extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkout import explained
from tiny_run import tiny_run

TARGET = 1.6
ARMS: dict[str, dict[str, int]] = {
    "k8, threads: trainer 1, engine 1": {"k": 8, "trainer": 1, "engine": 1},
    "k0, threads: trainer 1, engine 1": {"k": 0, "trainer": 1, "engine": 1},
    "k0, threads: trainer 2, engine 2": {"k": 0, "trainer": 2, "engine": 2},
    "k0, threads: trainer 2, engine 1": {"k": 0, "trainer": 2, "engine": 1},
}
ASYNCHRONOUS, *SYNCHRONOUS = ARMS


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", default="runs/tiny_1")
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--skip", type=int, default=6, help="steps left out: the pipeline fills")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out", default="runs/bench_async.jsonl", help="the runs, one JSON line each")
    return p


def main() -> None:
    """Measure what is missing and print."""
    a = parser().parse_args()
    if not Path(a.tiny, "policy", "config.json").is_file():
        message = f"--tiny: expected a folder with a warm policy, found {a.tiny}; run examples/quickstart.sh"
        parser().exit(2, f"{message}\n")
    settings = {"tiny": str(Path(a.tiny).resolve()), "steps": a.steps, "skip": a.skip, "machine": machine()}
    out = Path(a.out)
    rows = read(out, settings)
    for number, arm in order(a.rounds):
        if (number, arm) not in rows:
            load = os.getloadavg()[0]
            seconds = step_seconds(Path(a.tiny), ARMS[arm], a.steps, a.skip)
            row = {"round": number, "arm": arm, "seconds": seconds, "load_average": load, **settings}
            out.parent.mkdir(parents=True, exist_ok=True)
            with open(out, "a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
            rows[number, arm] = row
    print(json.dumps(summary(rows, a.rounds) | settings))


def machine() -> str:
    """Processor and cores."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def order(rounds: int) -> list[tuple[int, str]]:
    """(round, arm) of all runs: each round begins with the next arm."""
    arms = list(ARMS)
    return [(n, arm) for n in range(rounds) for arm in (*arms[n % len(arms) :], *arms[: n % len(arms)])]


def read(out: Path, settings: dict[str, Any]) -> dict[tuple[int, str], dict[str, Any]]:
    """The runs in `out` by round and arm, without an incomplete last line.

    Raises ValueError for runs with other settings, and for any other line.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    if not out.exists():
        return rows
    content = out.read_text(encoding="utf8")
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        out.write_text(whole, encoding="utf8")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            found = {key: row[key] for key in settings}
            key = int(row["round"]), str(row["arm"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{out} line {number}: expected a run of this benchmark, found {error!r}") from None
        if found != settings:
            raise ValueError(
                f"{out} line {number}: expected a run with {settings}, found {found}; give another --out"
            )
        rows[key] = row
    return rows


def summary(rows: dict[tuple[int, str], dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Ratio, its spread over rounds, and the spread of every arm."""
    seconds = {arm: [rows[n, arm]["seconds"] for n in range(rounds)] for arm in ARMS}
    best = min(SYNCHRONOUS, key=lambda arm: statistics.median(seconds[arm]))
    ratios = [slow / fast for slow, fast in zip(seconds[best], seconds[ASYNCHRONOUS])]
    return {
        "bench": "async",
        "ratio": spread(ratios),
        "target": TARGET,
        "k0_best": best,
        "rounds": rounds,
        "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
        "steps_per_hour": {arm: spread([3600 / value for value in values]) for arm, values in seconds.items()},
        "load_average": spread([row["load_average"] for row in rows.values()]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


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

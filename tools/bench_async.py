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

import json
import os
import statistics
from pathlib import Path

import harness
from checkout import explained
from tiny_run import tiny_run, warm_policy

TARGET = 1.6
ARMS = {
    "k8, threads: trainer 1, engine 1": {"k": 8, "trainer": 1, "engine": 1},
    "k0, threads: trainer 1, engine 1": {"k": 0, "trainer": 1, "engine": 1},
    "k0, threads: trainer 2, engine 2": {"k": 0, "trainer": 2, "engine": 2},
    "k0, threads: trainer 2, engine 1": {"k": 0, "trainer": 2, "engine": 1},
}
"""The first is asynchronous."""
parser = harness.benchmark(
    __doc__,
    tiny="runs/tiny_1",
    steps=16,
    skip=(6, "steps left out: the pipeline fills"),
    rounds=5,
    arms=(len(ARMS), "how many of the arms, from the first on"),
    out=(Path("runs/bench_async.jsonl"), "the runs, one JSON line each"),
)


def main():
    """Measure what is missing and print."""
    o = parser().parse_args()
    tiny = warm_policy(o.tiny)
    settings = {"tiny": str(tiny.resolve()), "steps": o.steps, "skip": o.skip}
    settings["machine"] = f"{harness.processor()}, {os.cpu_count()} cores"
    rows = read(o.out, settings)
    for number, arm in harness.turns(list(ARMS)[: o.arms], o.rounds):
        if (number, arm) not in rows:
            load = os.getloadavg()[0]
            seconds = step_seconds(tiny, ARMS[arm], o.steps, o.skip)
            row = {"round": number, "arm": arm, "seconds": seconds, "load_average": load, **settings}
            o.out.parent.mkdir(parents=True, exist_ok=True)
            with o.out.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
            rows[number, arm] = row
    harness.report(o, summary(rows, list(ARMS)[: o.arms], o.rounds) | settings)


def read(out, settings):
    """The runs in `out` by round and arm, without an incomplete last line.

    Raises ValueError for runs with other settings, and for any other line.
    """
    rows = {}
    if not out.exists():
        return rows
    content = out.read_text(encoding="utf8")
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        out.write_text(whole, encoding="utf8")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            run_settings = {key: row[key] for key in settings}
            key = int(row["round"]), str(row["arm"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{out} line {number}: this is not a run of this benchmark ({error!r})") from None
        if run_settings != settings:
            raise ValueError(
                f"{out} line {number}: this run had {run_settings}, and this one has {settings}; give another --out"
            )
        rows[key] = row
    return rows


def summary(rows, arms, rounds):
    """Ratio, its spread over rounds, and the spread of every arm."""
    seconds = {arm: [rows[n, arm]["seconds"] for n in range(rounds)] for arm in arms}
    best = min(arms[1:], key=harness.medians(seconds).__getitem__)
    ratios = harness.paired(seconds[best], seconds[arms[0]])
    return {
        "bench": "async",
        "ratio": harness.spread(ratios),
        "target": TARGET,
        "k0_best": best,
        "rounds": rounds,
        "ratio_of_each_round": [round(ratio, 3) for ratio in ratios],
        "steps_per_hour": {
            arm: harness.spread([3600 / value for value in values]) for arm, values in seconds.items()
        },
        "load_average": harness.spread([row["load_average"] for row in rows.values()]),
    }


def step_seconds(tiny, setting, steps, skip):
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

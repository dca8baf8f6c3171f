"""Optimizer steps per hour of PipelineRL-8 over those of synchronous training, on the same policy and machine.

    python tools/bench_async.py [--tiny runs/tiny_1] [--steps 16] [--rounds 5]

Complete runs of recipes/tiny_cpu.yaml without validations, with real trainer, engine and weight updates. k = 0 runs
with each thread setting, k = 8 with one thread per process. `--tiny` is a folder with a warm policy, as
examples/quickstart.sh makes it.

For a machine with other work on it: a round has one run of each arm, each round begins with another arm, and the
figure is the median over rounds of the ratio within a round, to the k = 0 setting with the best median. A run's own
figure is the median time between two steps after the first `skip` ones. Prints one JSON line with medians, quartiles
and extremes.
"""

import statistics
from functools import partial
from pathlib import Path

import harness
from checkout import explained
from tiny_run import tiny_run

with explained():
    from megatron_scalerl.checkpoints.jsonl import read_jsonl

ARMS = {
    "k8, threads: trainer 1, engine 1": (8, 1, 1),
    "k0, threads: trainer 1, engine 1": (0, 1, 1),
    "k0, threads: trainer 2, engine 2": (0, 2, 2),
    "k0, threads: trainer 2, engine 1": (0, 2, 1),
}
"""k and the threads of trainer and engine; the first is asynchronous."""
parser = harness.benchmark(
    __doc__,
    tiny=Path("runs/tiny_1"),
    steps=16,
    skip=(6, "steps left out: the pipeline fills"),
    rounds=5,
    arms=(len(ARMS), "how many of the arms, from the first on"),
)


def main():
    """Measure and print."""
    o = parser().parse_args()
    arms = {arm: partial(step_seconds, o, *ARMS[arm]) for arm in list(ARMS)[: o.arms]}
    seconds = harness.in_rounds(arms, o.rounds, warm_up=0)
    asynchronous, *synchronous = arms
    best = min(synchronous, key=harness.medians(seconds).__getitem__)
    ratios = harness.paired(seconds[best], seconds[asynchronous])
    line = {
        "ratio": harness.spread(ratios),
        "target": 1.6,
        "k0_best": best,
        "ratio_of_each_round": ratios,
        "steps_per_hour": {arm: harness.spread([3600 / value for value in seconds[arm]]) for arm in arms},
    }
    harness.report(o, line)


def step_seconds(o, k, trainer, engine):
    """Median seconds between two steps of one run."""
    overrides = (f"rollouts.max_staleness_steps={k}", f"trainer.threads={trainer}", f"engine.threads={engine}")
    with tiny_run(o.tiny, o.steps, *overrides) as run:
        return statistics.median(row["step_seconds"] for row in read_jsonl(run / "metrics.jsonl")[o.skip :])


if __name__ == "__main__":
    with explained():
        main()

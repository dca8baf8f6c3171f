"""Optimizer steps per hour with evaluations and validations beside the training, over the same run without them.

    python tools/bench_evaluation.py [--engines 4] [--rounds 3] [--seconds 40] [--json FILE]

The controller is the real one (stream, gate, journal, held engine, decoders, verifiers, ledger, result files) with
stand-ins for engines and trainer, as in tools/bench_controller.py: engines answer after a second in the mean, the
trainer's rank waits for two in a step, and a weight update labels the engines. The arms take turns:

    none    no validation, no evaluation
    held    an evaluation of 30 x 4 completions every 8 steps, on an engine held at its version
    all     validations of as many completions every 8 steps, with validation.engine all: the update waits

Engines have capacity to spare, as --engines is chosen here: what is measured is whether a step waits for the
measurement, not the generation that the held engine does not do for training. From the trace of each arm: the longest
gap between two optimizer steps, and whether an optimizer step began while an evaluation was in progress.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from checkout import explained

ARMS = ("none", "held", "all")
PROBLEMS, K, EVERY = 30, 4, 8
"""Of an evaluation, completions of each, and steps between two evaluations."""
CONTROLLER = 1
"""Its process in a trace (`tracing.chrome`)."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = harness.benchmark(
        __doc__,
        engines=4,
        warm_up=(10.0, "seconds before the measurement of an arm"),
        seconds=(40.0, "of the measurement of an arm"),
        rounds=3,
    )()
    p.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    p.set_defaults(in_flight=256, tokens=2600, delay=1.0, step_seconds=2.0, groups_per_batch=4, decoders=1)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import bench_controller as bench

    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.controller.evaluations import evaluation_inputs
    from megatron_scalerl.controller.ledger import Ledger
    from megatron_scalerl.controller.trace_file import trace_files
    from megatron_scalerl.prompts.dataset import PromptSet
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.tiny.tokenizer import build_tokenizer
    from megatron_scalerl.trainer.client import STEP
    from megatron_scalerl.types import Prompt


def recipe_for(folder: Path, arm: str, o: argparse.Namespace) -> Recipe:
    """bench_controller's recipe with the measurements of an arm, and a trace of all steps."""
    data = bench.recipe_for(folder, o).model_dump()
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i + 1}) + "\n" for i in range(PROBLEMS)))
    data["telemetry"]["trace_steps"] = [1, 10**6]
    if arm == "held":
        data["evaluation"] |= {"every_steps": EVERY, "files": [str(file)], "generations": K}
    if arm == "all":
        data["validation"] |= {"every_steps": EVERY, "generations": K, "engine": "all"}
    return Recipe.model_validate(data)


def prompts() -> PromptSet:
    """bench_controller's, with as many held-out ones as there are problems."""
    held = tuple(Prompt(prompt_id=f"h{i}", text=str(i), answer="0", token_ids=(1,) * 20) for i in range(PROBLEMS))
    return PromptSet(training=bench.prompts().training, held_out=held, report=None)


async def measure(folder: Path, arm: str, o: argparse.Namespace) -> dict[str, Any]:
    """The figures of one arm: steps per hour between two steps at least --seconds apart, and its folder's."""
    recipe = recipe_for(folder, arm, o)
    evaluation = evaluation_inputs(recipe, build_tokenizer(), [])
    more = {"evaluation": lambda _: evaluation, "sinks": lambda run: trace_files(recipe, run, step=0)}
    async with bench.controller_of(folder, recipe, prompts(), o, **more) as running:
        await running.elapse(o.warm_up)
        begin, steps = time.monotonic(), running.sync.steps
        await running.elapse(o.seconds)
        found = {"steps_per_hour": 3600 * (running.sync.steps - steps) / (time.monotonic() - begin)}
    return found | of_folder(running.folder, running.ledger)


def of_folder(folder: Path, ledger: Ledger) -> dict[str, Any]:
    """What the run's folder says: evaluations, waits, the ledger, and the trace."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    record = folder / "evaluation.jsonl"
    rows = read_jsonl(record) if record.exists() else []
    events = [e for path in (folder / "trace").glob("*.json") for e in json.loads(path.read_text())["traceEvents"]]
    steps = spans(events, STEP)
    evaluations = spans(events, "evaluation")
    inside = [s for s in steps for e in evaluations if e[0] <= s[0] <= e[1]]
    return {
        "evaluations": len({row["step"] for row in rows if "lost" not in row}),
        "versions_proved": all(proved(folder, row["step"]) for row in rows if "lost" not in row),
        "pinned_s": round(sum(row.get("pinned_seconds", 0.0) for row in metrics), 2),
        "wait_for_batch_s": round(statistics.fmean(row["wait_for_batch_seconds"] for row in metrics), 3),
        "steps_begun_inside_evaluations": len(inside),
        "evaluation_s": round(statistics.median(e[1] - e[0] for e in evaluations), 2) if evaluations else 0.0,
        "longest_gap_s": round(max((b[0] - a[1] for a, b in zip(steps[5:], steps[6:])), default=0.0), 3),
        "hours": {role: round(seconds / 3600, 5) for role, seconds in ledger.seconds().items() if seconds},
    }


def proved(folder: Path, step: int) -> bool:
    """Whether every completion of an evaluation has tokens of its step's version alone."""
    _, *rows = read_jsonl(folder / "evaluations" / f"step-{step:06d}" / "completions.jsonl")
    return bool(rows) and all(row["versions"] == [step, step] for row in rows)


def spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(begin, end) in seconds of the controller's spans of a name, in their order."""
    of_controller = (e for e in events if e.get("ph") == "X" and e["name"] == name and e["pid"] == CONTROLLER)
    return sorted((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in of_controller)


def main(o: argparse.Namespace) -> None:
    """All rounds, arm after arm."""
    arms = list(o.arms)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number, arm in harness.turns(arms, o.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found[arm].append(asyncio.run(measure(Path(folder), arm, o)))
        print(f"round {number}, {arm}: {json.dumps(found[arm][-1])}", file=sys.stderr, flush=True)
    rates = {arm: [each["steps_per_hour"] for each in of] for arm, of in found.items()}
    median = harness.medians(rates)
    rows = [
        (arm, f"{median[arm]:.0f}", f"{median[arm] / median[arms[0]]:.3f}", ", ".join(f"{each:.0f}" for each in of))
        for arm, of in rates.items()
    ]
    harness.table(("arm", "steps/h, median", "over the first", "rounds"), rows)
    harness.report(o, {"options": harness.asked(o), "arms": found}, shown=False)


if __name__ == "__main__":
    main(OPTIONS)

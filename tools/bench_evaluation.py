"""Optimizer steps per hour with evaluations and validations beside the training, over the same run without them.

    python tools/bench_evaluation.py [--engines 4] [--rounds 3] [--seconds 40] [--json FILE]

The controller is the real one (stream, gate, journal, held engine, decoders, verifiers, ledger, result files) with
stand-ins for engines and trainer, as in tools/bench_controller.py: engines answer after --delay seconds in the mean,
the trainer's rank waits for --step-seconds in a step, and a weight update labels the engines. The arms take turns:

    none    no validation, no evaluation
    held    an evaluation of --problems x --k completions every --every steps, on an engine held at its version
    all     validations of as many completions every --every steps, with validation.engine all: the update waits

Engines have capacity to spare, as --engines is chosen here: what is measured is whether a step waits for the
measurement, not the generation that the held engine does not do for training. From the trace of each arm: the longest
gap between two optimizer steps, and whether an optimizer step began while an evaluation was in progress.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkout import explained

ARMS = ("none", "held", "all")
CONTROLLER = 1
"""Its process in a trace (`tracing.chrome`)."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engines", type=int, default=4)
    p.add_argument("--in-flight", type=int, default=256, help="completions, rounded up to whole groups per engine")
    p.add_argument("--tokens", type=int, default=2600, help="of a completion; at least 2,400")
    p.add_argument("--delay", type=float, default=1.0, help="mean seconds of a completion")
    p.add_argument("--step-seconds", type=float, default=2.0, help="of the stand-in trainer")
    p.add_argument("--groups-per-batch", type=int, default=4)
    p.add_argument("--problems", type=int, default=30)
    p.add_argument("--k", type=int, default=4)
    p.add_argument("--every", type=int, default=8, help="steps between evaluations")
    p.add_argument("--warm-up", type=float, default=10.0, help="seconds before the measurement of an arm")
    p.add_argument("--seconds", type=float, default=40.0, help="of the measurement of an arm")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    p.add_argument("--json", metavar="FILE")
    p.set_defaults(decoders=1)
    return p


if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import bench_controller as bench
    from rich.console import Console
    from rich.table import Table
    from stand_in_trainer import INFO

    from megatron_scalerl.checkpoints.jsonl import read_jsonl
    from megatron_scalerl.controller.evaluations import evaluation_inputs
    from megatron_scalerl.controller.ledger import Ledger
    from megatron_scalerl.controller.loop import Controller
    from megatron_scalerl.controller.meter import Meter, metering
    from megatron_scalerl.controller.progress import Progress
    from megatron_scalerl.controller.run_folder import RunFolder, resume_point
    from megatron_scalerl.controller.trace_file import trace_files
    from megatron_scalerl.engine.client import EngineClient
    from megatron_scalerl.engine.membership import Membership
    from megatron_scalerl.launch.hosts import allow_open_files
    from megatron_scalerl.launch.placement import Devices, Fleet
    from megatron_scalerl.processes.signals import SaveAndExit
    from megatron_scalerl.prompts.dataset import PromptSet
    from megatron_scalerl.recipe import Recipe
    from megatron_scalerl.rewards.pool import VerifierPool
    from megatron_scalerl.rollouts.decoder_pool import DecoderPool
    from megatron_scalerl.rollouts.history import read_history
    from megatron_scalerl.rollouts.plans import Plans
    from megatron_scalerl.rollouts.sampler import Sampler
    from megatron_scalerl.tiny.tokenizer import build_tokenizer
    from megatron_scalerl.trainer.client import STEP
    from megatron_scalerl.types import Prompt


def recipe_for(folder: Path, arm: str, o: argparse.Namespace) -> Recipe:
    """bench_controller's recipe with the measurements of an arm, and a trace of all steps."""
    data = bench.recipe_for(folder, o).model_dump()
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i + 1}) + "\n" for i in range(o.problems)))
    data["telemetry"]["trace_steps"] = [1, 10**6]
    if arm == "held":
        data["evaluation"] |= {"every_steps": o.every, "files": [str(file)], "generations": o.k}
    if arm == "all":
        data["validation"] |= {"every_steps": o.every, "generations": o.k, "engine": "all"}
    return Recipe.model_validate(data)


def prompts(o: argparse.Namespace) -> PromptSet:
    """bench_controller's, with as many held-out ones as there are problems."""
    held = tuple(Prompt(prompt_id=f"h{i}", text=str(i), answer="0", token_ids=(1,) * 20) for i in range(o.problems))
    return PromptSet(training=bench.prompts().training, held_out=held, report=None)  # type: ignore[arg-type]


async def measure(folder: Path, arm: str, o: argparse.Namespace) -> dict[str, Any]:
    """The figures of one arm."""
    recipe, tokenizer = recipe_for(folder, arm, o), build_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    allow_open_files(recipe)
    evaluation = evaluation_inputs(recipe, tokenizer, [])
    async with contextlib.AsyncExitStack() as stack:
        run = stack.enter_context(contextlib.closing(RunFolder(recipe)))
        urls, _ = stack.enter_context(bench.stand_in_engines(o))
        clients = [
            await stack.enter_async_context(EngineClient(url=url, secret="bench", name=f"engine-{index}"))
            for index, url in enumerate(urls)
        ]
        verifier = await stack.enter_async_context(VerifierPool(recipe.rewards))
        plans = Plans(recipe, tokenizer)
        decoders = await stack.enter_async_context(DecoderPool(recipe, tokenizer, plans, logs=folder))
        trainer, _ = await stack.enter_async_context(bench.trainer_of(folder, o.step_seconds))
        start, devices = resume_point(run.path), Devices(unit="device_hours", trainer=1, engine=o.engines)
        ledger = Ledger(run.path / "ledger.jsonl", "device_hours", incarnation="local.0")
        stack.enter_context(contextlib.closing(ledger))
        meter = Meter(ledger, devices, start)
        await stack.enter_async_context(metering(meter))
        engines = Membership.of(clients, version=None)
        sync = bench.StandInSync(engines)
        controller = Controller(
            recipe=recipe,
            prompts=prompts(o),
            evaluation=evaluation,
            folder=run,
            fleet=Fleet(trainer=trainer, info=INFO, engines=engines, devices=devices),
            start=start,
            history=read_history(run.path),
            sampler=Sampler(plans, decoders=decoders, verifier=verifier),
            sync=sync,  # type: ignore[arg-type]
            probe=bench.StandInProbe(),  # type: ignore[arg-type]
            meter=meter,
            progress=Progress(Console(file=open(os.devnull, "w")), recipe.steps),  # noqa: SIM115
            saving=SaveAndExit(),
            sinks=trace_files(recipe, run.path, step=0),
        )
        running = asyncio.create_task(controller.run())
        try:
            found = await observe(running, sync, o)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return found | of_folder(run.path, ledger)


async def observe(running: asyncio.Task[str], sync: bench.StandInSync, o: argparse.Namespace) -> dict[str, Any]:
    """Steps per hour between two steps that are at least --seconds apart, after --warm-up."""
    await bench.elapse(running, o.warm_up)
    await bench.step(running, sync, 10 * o.seconds)
    begin, steps = time.monotonic(), sync.steps
    await bench.elapse(running, o.seconds)
    await bench.step(running, sync, 10 * o.seconds)
    return {"steps_per_hour": 3600 * (sync.steps - steps) / (time.monotonic() - begin)}


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
    for number in range(o.rounds):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            with tempfile.TemporaryDirectory() as folder:
                found[arm].append(asyncio.run(measure(Path(folder), arm, o)))
            print(f"round {number}, {arm}: {json.dumps(found[arm][-1])}", file=sys.stderr, flush=True)
    rates = {arm: statistics.median(each["steps_per_hour"] for each in found[arm]) for arm in arms}
    table = Table("arm", "steps/h, median", "over the first", "rounds")
    for arm in arms:
        rounds = ", ".join(f"{each['steps_per_hour']:.0f}" for each in found[arm])
        table.add_row(arm, f"{rates[arm]:.0f}", f"{rates[arm] / rates[arms[0]]:.3f}", rounds)
    Console().print(table)
    if o.json:
        Path(o.json).write_text(json.dumps({"options": vars(o), "arms": found}, indent=2))


if __name__ == "__main__":
    main(OPTIONS)

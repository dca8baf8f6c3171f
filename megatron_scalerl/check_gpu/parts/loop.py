"""Part loop: the tiny recipe end to end on one device: a warm start, then ScaleRL runs, all by the command line.

    warm start     python -m megatron_scalerl sft
    eager          python -m megatron_scalerl train, fp32 logits, vLLM without CUDA graphs
    graphs         the same with torch.compile and CUDA graphs, vLLM's default (GPUs only)
    model logits   eager, with logits in the policy's own bfloat16 (GPUs only)

Trainer and engine share the device; weights are sent over gloo. The overrides of all runs are validated before the
first one starts, also on CPUs.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.loop_run import LoopRun, command, faults, read_run, sft_losses
from megatron_scalerl.check_gpu.part import Deadline, PartSetting
from megatron_scalerl.check_gpu.programs import CAPTURED, GRACE_S
from megatron_scalerl.check_gpu.tiny_task import (
    Run,
    check_overrides,
    common,
    overrides,
    recipe_path,
    sft_steps,
    tiny_folder,
)
from megatron_scalerl.tiny.tokenizer import MODEL_VOCABULARY

WARM_START, COMPARISON = "warm start", "mismatch fp32 below model"
BOUNDS = {"float32": 1e-4, "bfloat16": 0.01}
"""Mean |trainer - engine log-prob| (nats) on tokens of staleness 0, with fp32 logits. On two CPU cores the same run
has 8e-4 in bfloat16 after the same warm start (1.3e-3 with bfloat16 logits), and 3e-7 in fp32 after 30 steps."""
WARM_LOSS = 1.0
"""Bound of the final loss of a full warm start (nats per token); the task's own entropy is about 0.1."""


RUNS = (
    Run(check="eager", overrides=("engine.vllm.enforce_eager=true",), steps=10, limit_s=70, on_cpu=True),
    Run(
        check="graphs",
        overrides=("engine.vllm.enforce_eager=false",),
        steps=10,
        limit_s=95,
        on_cpu=False,
        more_s=30,
        captures=True,
    ),
    Run(
        check="model logits",
        overrides=("engine.vllm.enforce_eager=true", "policy.logits=model", "weights.probe_tolerance=10"),
        steps=3,
        limit_s=60,
        on_cpu=False,
        validates=False,
    ),
)
WARM_START_S = 45.0
"""Time limit of the warm start on a GPU."""
_NOT_ON_CPU = {
    "graphs": "CUDA graphs require a GPU",
    "model logits": "the rehearsal is in fp32, where both kinds of logits are the same",
    COMPARISON: "the rehearsal is in fp32, where both kinds of logits are the same",
}


def run(setting: PartSetting, record: Recorder) -> None:
    """All checks of the part."""
    deadline = Deadline(setting.limit_s)
    try:
        recipe, tiny = recipe_path(), tiny_folder(setting)
        for one in RUNS:
            check_overrides(recipe, overrides(setting, tiny, one, policy=tiny / "policy", warm=True))
    except ValueError as error:
        record.holds(WARM_START, False, str(error))
        for check in (*(one.check for one in RUNS), COMPARISON):
            record.not_run(check, "invalid settings")
        return
    asyncio.run(_run(setting, record, deadline, recipe, tiny))


async def _run(setting: PartSetting, record: Recorder, deadline: Deadline, recipe: Path, tiny: Path) -> None:
    folder = setting.scratch / "loop"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy = await _warm_start(setting, record, deadline, recipe, tiny)
    done: dict[str, LoopRun] = {}
    for number, one in enumerate(RUNS):
        if not (setting.on_gpu or one.on_cpu):
            record.not_run(one.check, _NOT_ON_CPU[one.check])
            continue
        short = deadline.too_short(*needs(one, done)) if setting.on_gpu else ""
        if short:
            record.not_run(one.check, short)
            continue
        settings = overrides(setting, tiny, one, policy=policy or tiny / "base_policy", warm=policy is not None)
        found = await command(
            ["train", str(recipe), *settings],
            folder / f"train-{one.check.replace(' ', '_')}.log",
            limit_s=run_limit(deadline.left(), number) if setting.on_gpu else deadline.left(),
        )
        done[one.check] = read_run(folder / one.check.replace(" ", "_"), found)
        _judge(setting, record, one, done[one.check], warm=policy is not None)
    _compare(setting, record, done)


def needs(one: Run, done: Mapping[str, LoopRun]) -> tuple[float, str]:
    """(estimated seconds of a run, basis of the estimate): scaled from the measured time of the eager run."""
    seconds = done["eager"].expected_seconds(one.steps) if "eager" in done else math.nan
    if not math.isfinite(seconds):
        return one.limit_s, "time limit, without an eager run to scale from"
    return seconds + one.more_s, f"scaled from {done['eager'].seconds:.0f} s of the eager run"


def run_limit(left_s: float, number: int) -> float:
    """Time limit of RUNS[number] out of `left_s` that leaves every later run its own limit."""
    later = sum(one.limit_s + GRACE_S for one in RUNS[number + 1 :])
    return max(left_s - later - GRACE_S, min(left_s, RUNS[number].limit_s))


async def _warm_start(
    setting: PartSetting, record: Recorder, deadline: Deadline, recipe: Path, tiny: Path
) -> Path | None:
    """Folder of the resulting policy; None if there is none."""
    out = tiny / "policy"
    shutil.rmtree(out, ignore_errors=True)
    settings = [*common(setting, tiny), "name=sft", f"policy.path={tiny / 'base_policy'}"]
    done = await command(
        ["sft", str(recipe), *settings, "--out", str(out)],
        setting.scratch / "loop" / "sft.log",
        limit_s=deadline.left(WARM_START_S if setting.on_gpu else math.inf),
    )
    losses, made = sft_losses(done.output), (out / "config.json").is_file()
    if done.code != 0 or not made or not losses:
        record.holds(WARM_START, False, f"warm start {done.failure() or 'left no policy or reported no loss'}")
        return out if made and done.code == 0 else None
    record.measured(
        WARM_START,
        losses[-1],
        "nats per token",
        at_most=math.log(MODEL_VOCABULARY) if setting.toy else WARM_LOSS,
        detail=f"loss after {sft_steps(setting)} steps of 32 examples, {done.seconds:.0f} s including startup",
        data={"seconds": done.seconds, "losses": losses},
    )
    return out


def _judge(setting: PartSetting, record: Recorder, one: Run, found: LoopRun, *, warm: bool) -> None:
    steps = 2 if setting.toy else one.steps
    wrong = faults(found, steps=steps, warm=warm and not setting.toy, validated=one.validates)
    if one.captures and setting.on_gpu and not found.facts["cuda_graphs"].startswith(CAPTURED):
        wrong.append(f"expected captured CUDA graphs, found them {found.facts['cuda_graphs']}")
    if wrong:
        record.faultless(one.check, wrong, data=found.data())
        return
    rates = " to ".join(f"{rate:.3g}" for rate in found.pass_rates) or "not measured"
    detail = (
        f"mean |trainer - engine log-prob| of {found.mismatch_tokens:.0f} tokens, {found.steps} steps in "
        f"{found.seconds:.0f} s including startup; pass rate {rates}; "
        f"attention {found.facts['attention_backend']}, CUDA graphs {found.facts['cuda_graphs']}"
    )
    # bfloat16 logits have a larger error, which the comparison measures, and no bound
    bound = None if "policy.logits=model" in one.overrides else BOUNDS["bfloat16" if setting.on_gpu else "float32"]
    record.measured(one.check, found.mismatch, "nats", at_most=bound, detail=detail, data=found.data())


def _compare(setting: PartSetting, record: Recorder, done: dict[str, LoopRun]) -> None:
    """The mean mismatch with fp32 logits over that with bfloat16 logits, in the same first steps.

    Mismatches of later steps are not comparable, because the policies differ.
    """
    if not setting.on_gpu:
        record.not_run(COMPARISON, _NOT_ON_CPU[COMPARISON])
        return
    runs = [done[name] for name in ("eager", "model logits") if name in done]
    steps = min((one.steps for one in runs), default=0)
    exact, coarse = (one.mismatch_until(steps) for one in runs) if len(runs) == 2 else (math.nan, math.nan)
    if not (math.isfinite(exact) and math.isfinite(coarse) and coarse > 0):
        record.not_run(COMPARISON, f"expected the mismatch of both runs, found {exact:.3g} and {coarse:.3g} nats")
        return
    record.measured(
        COMPARISON,
        exact / coarse,
        "ratio",
        at_most=1.0,
        detail=f"{exact:.3g} nats with fp32 logits, {coarse:.3g} with bfloat16 logits, in {steps} steps of each",
    )

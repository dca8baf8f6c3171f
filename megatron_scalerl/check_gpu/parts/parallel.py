"""Part parallel: the same step on two devices under each kind of parallelism and on one, over NCCL or gloo.

With plain layers in fp32 only the order of sums differs. With Transformer Engine in bf16 partial sums are rounded
before ranks add them, so two layouts are two bf16 results, whose tolerance is relative to the bf16 error of
transformers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_scalerl.batching.assignment import plan_step, sample_facts
from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.check_gpu.cases import Case, bare_recipe, case_of, samples
from megatron_scalerl.check_gpu.findings import Distance, Recorder
from megatron_scalerl.check_gpu.loop_run import command, faults, read_run
from megatron_scalerl.check_gpu.part import Deadline, PartSetting
from megatron_scalerl.check_gpu.ranks import run_ranks
from megatron_scalerl.check_gpu.step_parity import (
    FP32_BOUND,
    TWO_ROUNDINGS,
    Step,
    bound_threads,
    fp32_distances,
    in_transformers,
    is_mixture,
    two_bf16_distances,
    typical,
    without_ties,
)
from megatron_scalerl.check_gpu.table import PARALLEL, Layers
from megatron_scalerl.check_gpu.tiny_task import Run, check_overrides, overrides, recipe_path, tiny_folder
from megatron_scalerl.distributed.parallel import shutdown_parallel
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.trainer.batch_frames import BatchFrames
from megatron_scalerl.trainer.messages import batch_frames
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer

_KINDS = ("llama", "qwen3_moe")
_OVER_NCCL = Run(check="broadcast", overrides=("engine.vllm.enforce_eager=true",), steps=3, limit_s=90, on_cpu=False)
_CUTS: dict[str, dict[str, Any]] = {
    "TP2": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}},
    "PP2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "EP2": {"parallel": {"expert_model_parallel_size": 2}},
    "CP2": {"parallel": {"context_parallel_size": 2}},
}
"""Section `megatron` of a recipe by layout; DP2 and a single rank have none."""
_LENGTHS = (59, 16, 128, 199, 63, 32, 89, 120)
_MICRO_BATCH_TOKENS = 256
_LAUNCH_S = 60.0
"""Time limit of one group of processes on GPUs; about 30 s are expected for imports, CUDA, NCCL and kernels."""
_LEAST_S = 15.0
"""No group is started with less time left: imports take most of that."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One policy and the sequences for all layouts. Produced by `_write`."""

    kind: str
    path: Path
    seed: int
    """Seed of the sequences, which have no ties of router logits."""
    own: float
    """bf16 error of transformers, nats (`step_parity.typical`)."""

    def run(self, layout: str) -> dict[str, Any]:
        """For `measure`."""
        return {"layout": layout, "kind": self.kind, "policy": str(self.path), "seed": self.seed}


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    bound_threads()
    deadline = Deadline(setting.limit_s)
    policies = {kind: _write(kind, setting) for kind in _KINDS}
    _steps(setting, record, deadline, policies, "plain", "float32")
    if setting.on_gpu and importlib.util.find_spec("transformer_engine"):
        _steps(setting, record, deadline, policies, "te", "bfloat16")
    else:
        why = "Transformer Engine is not installed" if setting.on_gpu else "Transformer Engine has no CPU kernels"
        for name in PARALLEL:
            record.not_run(f"{name} te", why)
    with record.guarded("broadcast"):
        _broadcast(setting, record, deadline)


def _write(kind: str, setting: PartSetting) -> Policy:
    """A random policy in bf16, so that both precisions start from the same weights."""
    case, path = case_for(kind, toy=setting.toy), setting.scratch / "parallel" / kind
    case.write(path)
    case, exact = without_ties(case, path)
    rounded = in_transformers(case, path, torch.bfloat16)
    return Policy(kind=kind, path=path, seed=case.seed, own=typical(kind, rounded.logprobs, exact.logprobs))


def _steps(
    setting: PartSetting,
    record: Recorder,
    deadline: Deadline,
    policies: Mapping[str, Policy],
    layers: Layers,
    dtype: str,
) -> None:
    """One rank, then two under each layout; on GPUs each layout has its own processes, in case one hangs."""
    suffix = " te" if layers == "te" else ""
    used = {name: policies["qwen3_moe" if name == "EP2" else "llama"] for name in PARALLEL}

    def ranks(count: int, runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
        left = deadline.left() - (_OVER_NCCL.limit_s if setting.on_gpu else 0.0)
        if left < _LEAST_S:
            raise _NoTimeError(f"{max(0.0, left):.0f} s were left of the part's {setting.limit_s:.0f} s")
        return run_ranks(
            count,
            "megatron_scalerl.check_gpu.parts.parallel:measure",
            {"dtype": dtype, "runs": runs, "toy": setting.toy},
            folder=setting.scratch / "parallel" / layers / name,
            timeout_s=min(left, _LAUNCH_S) if setting.on_gpu else left,
            env={"MSRL_LAYERS": layers},
        )[0]

    try:
        alone = ranks(1, [policy.run(kind) for kind, policy in policies.items()], "alone")
    except RuntimeError as error:
        _report_unmade(record, PARALLEL, suffix, error, "single rank: ")
        return
    for group in _groups(setting):
        try:
            found = ranks(2, [used[name].run(name) for name in group], group[0] if len(group) == 1 else "all")
        except RuntimeError as error:
            _report_unmade(record, group, suffix, error)
            continue
        for name in group:
            policy = used[name]
            record.compared(name + suffix, distances(policy.kind, found[name], alone[policy.kind], dtype, policy.own))


class _NoTimeError(RuntimeError):
    """Not enough time left to start."""


def _report_unmade(
    record: Recorder, names: Sequence[str], suffix: str, error: RuntimeError, prefix: str = ""
) -> None:
    """Record layouts whose processes failed or were not started."""
    for name in names:
        if isinstance(error, _NoTimeError):
            record.not_run(name + suffix, f"{prefix}{error}")
        else:
            record.holds(name + suffix, False, f"{prefix}{error}")


def _groups(setting: PartSetting) -> Iterator[tuple[str, ...]]:
    """Groups of layouts that share processes."""
    return ((name,) for name in PARALLEL) if setting.on_gpu else iter([PARALLEL])


def distances(
    kind: str, found: Mapping[str, Any], alone: Mapping[str, Any], dtype: str, own: float
) -> list[Distance]:
    """Compare the step of two ranks with that of one: log-probs before and after it, loss, gradient norm.

    own: bf16 error of transformers, nats. After the step router logits may have ties again, so that mixtures of
    experts are compared by the median in fp32 too.
    """
    ours, theirs = (
        Step(logprobs=np.asarray(each["before"]), loss=each["loss"], grad_norm=each["grad_norm"])
        for each in (found, alone)
    )
    after = np.abs(np.asarray(found["after"]) - np.asarray(alone["after"]))
    if dtype == "float32":
        apart = typical(kind, found["after"], alone["after"]) if is_mixture(kind) else float(after.max())
        return [*fp32_distances(ours, theirs), Distance(name="after the step", found=apart, bound=FP32_BOUND)]
    apart = typical(kind, found["after"], alone["after"])
    return [
        *two_bf16_distances(kind, ours, theirs, own),
        Distance(name="after the step", found=apart, bound=TWO_ROUNDINGS * own),
    ]


def _broadcast(setting: PartSetting, record: Recorder, deadline: Deadline) -> None:
    """A short run with trainer and engine on different GPUs: every weight update goes over NCCL."""
    recipe, tiny = recipe_path(), tiny_folder(setting)
    settings = overrides(setting, tiny, _OVER_NCCL, policy=tiny / "base_policy", warm=False, transport="nccl")
    check_overrides(recipe, settings)
    if not setting.on_gpu:
        record.not_run("broadcast", "NCCL requires two GPUs; the part loop runs the same command over gloo")
        return
    log = setting.scratch / "loop" / "train-broadcast.log"
    log.parent.mkdir(exist_ok=True)
    shutil.rmtree(log.parent / _OVER_NCCL.check, ignore_errors=True)  # a run resumes an earlier one
    limit = deadline.left(_OVER_NCCL.limit_s)
    done = asyncio.run(command(["train", str(recipe), *settings], log, limit_s=limit))
    found = read_run(log.parent / _OVER_NCCL.check, done)
    wrong = faults(found, steps=_OVER_NCCL.steps, warm=False)
    detail = f"{found.steps} updates in {found.seconds:.0f} s including startup, mismatch {found.mismatch:.2g} nats"
    record.faultless("broadcast", wrong, detail, found.data())


def case_for(kind: str, *, toy: bool) -> Case:
    """The case of a family with several micro-batches for each data-parallel rank."""
    return replace(case_of(kind, toy=toy), lengths=_LENGTHS, micro_batch_tokens=_MICRO_BATCH_TOKENS)


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """Runs on each rank: log-probs, one step, log-probs again, for each layout of job["runs"].

    A run has the keys of `Policy.run`; job["dtype"] is policy.dtype.
    """
    found = {}
    for number, run in enumerate(job["runs"]):
        if number:
            shutdown_parallel(keep_world=True)
        case = replace(case_for(run["kind"], toy=job["toy"]), seed=run["seed"])
        found[run["layout"]] = _one(run["layout"], case, run["policy"], job["dtype"], rendezvous)
    return found


def _one(layout: str, case: Case, policy: str, dtype: str, rendezvous: FolderRendezvous) -> dict[str, Any]:
    recipe = bare_recipe(
        policy,
        dtype,
        case.micro_batch_tokens,
        trainer={"world_size": int(os.environ["WORLD_SIZE"])},
        # with a small eps AdamW's first update is the gradient's sign, which amplifies rounding errors
        optimizer={"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
        megatron=_CUTS.get(layout, {}),
    )
    parallel = init_parallel(recipe, rendezvous)
    trainer = make_trainer(recipe, parallel)
    ids = case.token_ids()
    before = trainer.logprobs(ids)
    found = samples(ids, before)  # all ratios are 1 on every rank
    plan = plan_step(
        [sample_facts(sample) for sample in found],
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=case.micro_batch_tokens,
        policy_version=0,
    )
    batches = BatchFrames(trainer, parallel)
    if parallel.holds_batch:  # the others get it from this rank, as in a run
        own = [write(found[number].rollout) for number in plan.numbers[parallel.dp_rank]]
        batches.hold(batch_frames(plan.ranks[parallel.dp_rank], own))
    report = trainer.step(batches.take(1))
    return {
        "before": [float(value) for value in chain(*before)],
        "after": [float(value) for value in chain(*trainer.logprobs(ids))],
        "loss": report.loss,
        "grad_norm": report.grad_norm,
    }

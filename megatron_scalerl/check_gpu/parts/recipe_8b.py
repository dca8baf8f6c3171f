"""Part recipe-8b: the trainer of the 8B recipe on eight GPUs (TP 2, sequence parallel, DP 4), with fewer layers.

Weights are random: only a config.json is written. A rehearsal uses two CPU ranks and toy widths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import megatron_scalerl
from megatron_scalerl.batching.packing import pack
from megatron_scalerl.check_gpu.cases import TOY, full_micro_batches
from megatron_scalerl.check_gpu.device_memory import memory, peak_since, reset_peaks, used_by_driver
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.check_gpu.parts.shapes import report_memory
from megatron_scalerl.check_gpu.ranks import run_ranks
from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.plan.work import predict_trainer
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer, pad_multiple

STEPS = 4
"""The first step allocates and compiles; the last one is reported."""
LAYERS = 8
"""Of the recipe's 32: a quarter of its work, built in seconds."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    root = Path(megatron_scalerl.__file__).parent.parent / "recipes"
    folder = setting.scratch / "recipe-8b"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((root / "configs" / "Llama-3.1-8B" / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS} | (TOY | {"num_hidden_layers": 2} if setting.toy else {})
    (folder / "config.json").write_text(json.dumps(config))
    world = 2 if setting.toy else 8
    overrides = [f"trainer.world_size={world}", "optimizer.warmup_steps=0"]
    overrides += ["trainer.micro_batch_tokens=256", "policy.dtype=float32"] if setting.toy else []
    job = {
        "recipe": str(root / "scalerl_llama3_8b.yaml"),
        "overrides": overrides,
        "policy": str(folder),
        "micro_batches": 2,
    }
    with record.guarded("steps"):
        found = run_ranks(
            world,
            "megatron_scalerl.check_gpu.parts.recipe_8b:measure",
            job,
            folder=folder / "ranks",
            timeout_s=0.9 * setting.limit_s,
            env={},
        )
        _report(setting, record, job, found)
        return
    record.not_run("memory", "its steps failed")


def _report(setting: PartSetting, record: Recorder, job: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Both checks: the ranks agree on the loss, and the fullest rank's memory is as predicted."""
    recipe = load(job)
    predicted = predict_trainer(
        recipe,
        job["policy"],
        layers="te" if device.HAVE_TE else "plain",
        device="gpu" if setting.on_gpu else "cpu",
        sequence_tokens=recipe.micro_batch_tokens,
    )
    losses = [answer["losses"] for answer in found]
    seconds = max(answer["seconds"][-1] for answer in found)
    rate = found[0]["tokens"] / seconds
    flops = predicted.model_flops_per_token * rate / len(found)
    text = f"{seconds:.3f} s per step of {found[0]['tokens']:,} tokens, {flops / 1e12:.4g} model TFLOP/s per rank"
    finite = all(math.isfinite(value) for loss in losses for value in loss)
    same = all(loss == losses[0] for loss in losses)
    wrong = f"expected the same finite loss on all ranks in each step, found {losses}"
    record.holds("steps", finite and same, text if finite and same else wrong, {"ranks": found})
    fullest = max((answer["peak"] for answer in found), key=lambda peak: peak["total"])
    said = {"total_bytes": predicted.total_bytes, "terms": {term.name: term.bytes for term in predicted.terms}}
    report_memory(record, "memory", said, fullest, judged=setting.on_gpu, data={"parameters": predicted.parameters})


def load(job: Mapping[str, Any]) -> Recipe:
    """The job's recipe with its overrides and its policy folder."""
    return load_recipe(job["recipe"], [*job["overrides"], f"policy.path={job['policy']}"])


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """Runs on each rank: seconds and loss of each step, tokens of all ranks, this rank's `Peak` of device memory."""
    before = used_by_driver() if device.HAVE_GPU else None  # first: CUDA context and NCCL count for this rank
    recipe = load(job)
    parallel = init_parallel(recipe, rendezvous)
    reset_peaks()
    before = before if device.HAVE_GPU else memory().used
    trainer = make_trainer(recipe, parallel, load_weights=False)
    size = recipe.micro_batch_tokens
    vocab = json.loads(Path(job["policy"], "config.json").read_text())["vocab_size"]
    batches = pack(
        full_micro_batches(parallel.dp_size * job["micro_batches"], size, vocab),
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=size,
        pad_multiple=pad_multiple(parallel),
        policy_version=0,
    )
    reports = [trainer.step(replace(batches[parallel.dp_rank], step=step)) for step in range(1, STEPS + 1)]
    return {
        "seconds": [report.seconds for report in reports],
        "losses": [report.loss for report in reports],
        "tokens": reports[-1].tokens,
        "peak": asdict(peak_since(before)),
    }

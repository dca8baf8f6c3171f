"""What one trainer rank does to try a recipe's layout at full width: a few steps on full micro-batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_scalerl.batching.packing import pack
from megatron_scalerl.check_gpu.device_memory import forget_peaks, memory, peak_since, used_by_driver
from megatron_scalerl.check_gpu.synthetic import full_micro_batches
from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.parallel import init_parallel
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer.step import make_trainer, pad_multiple

STEPS = 4
"""The first allocates and compiles; the last is the one that is reported."""


def load(job: Mapping[str, Any]) -> Recipe:
    """The job's recipe with its overrides and its policy folder."""
    return load_recipe(job["recipe"], [*job["overrides"], f"policy.path={job['policy']}"])


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """Seconds of each step, losses, tokens of all ranks, and this rank's `Peak` of device memory."""
    before = used_by_driver() if device.HAVE_GPU else None  # first: CUDA's context and NCCL are this rank's own
    recipe = load(job)
    parallel = init_parallel(recipe, rendezvous)
    forget_peaks()
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

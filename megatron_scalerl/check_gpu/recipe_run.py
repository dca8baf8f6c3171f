"""What one trainer rank does to try a recipe's layout at full width: a few steps on full micro-batches."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_scalerl.batch import pack
from megatron_scalerl.check_gpu.device_memory import forget_peaks, memory
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe_file import load_recipe
from megatron_scalerl.rendezvous import FolderRendezvous
from megatron_scalerl.trainer.parallel import init_parallel
from megatron_scalerl.trainer.step import make_trainer, pad_multiple
from megatron_scalerl.types import Rollout, Sample

STEPS = 4
"""The first allocates and compiles; the last is the one that is reported."""


def load(job: Mapping[str, Any]) -> Recipe:
    """The job's recipe with its overrides and its policy folder."""
    return load_recipe(job["recipe"], [*job["overrides"], f"policy.path={job['policy']}"])


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """Seconds of each step, losses, tokens of all ranks, and this rank's peak of device memory (bytes)."""
    recipe = load(job)
    parallel = init_parallel(recipe, rendezvous)
    forget_peaks()
    before = memory()
    trainer = make_trainer(recipe, parallel, load_weights=False)
    size = recipe.micro_batch_tokens
    vocab = json.loads(Path(job["policy"], "config.json").read_text())["vocab_size"]
    batches = pack(
        _full(parallel.dp_size * job["micro_batches"], size, vocab),
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=size,
        pad_multiple=pad_multiple(parallel),
        policy_version=0,
    )
    reports = [trainer.step(replace(batches[parallel.dp_rank], step=step)) for step in range(1, STEPS + 1)]
    peak = memory()
    return {
        "seconds": [report.seconds for report in reports],
        "losses": [report.loss for report in reports],
        "tokens": reports[-1].tokens,
        "peak_allocated": peak.peak_allocated,
        "peak_reserved": peak.peak_reserved,
        "used": max(0, peak.used - before.used),
        "world_size": int(os.environ["WORLD_SIZE"]),
    }


def _full(count: int, size: int, vocab: int) -> list[Sample]:
    """`count` sequences that fill a micro-batch each: an eighth prompt, random tokens."""
    rng = random.Random(0)
    prompt = size // 8
    return [_sample(rng, prompt, size - prompt, vocab, 1.0 / count) for _ in range(count)]


def _sample(rng: random.Random, prompt: int, size: int, vocab: int, weight: float) -> Sample:
    rollout = Rollout(
        token_ids=tuple(rng.choices(range(vocab), k=size)),
        rollout_logprobs=(-11.0,) * size,
        policy_versions=(0,) * size,
        loss_mask=(True,) * size,
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )
    prompt_ids = tuple(rng.choices(range(vocab), k=prompt))
    return Sample(
        prompt_token_ids=prompt_ids, rollout=rollout, advantage=rng.choice((-1.0, 1.0)), token_weight=weight / size
    )

"""What one trainer rank does to compare parallel layouts: log-probabilities, one step, log-probabilities again."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megatron_scalerl.batch import pack
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rendezvous import FolderRendezvous
from megatron_scalerl.trainer.parallel import init_parallel, shutdown_parallel
from megatron_scalerl.trainer.step import make_trainer, pad_multiple
from megatron_scalerl.types import Rollout, Sample

_CUTS: dict[str, dict[str, Any]] = {
    "TP2": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}},
    "PP2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "EP2": {"parallel": {"expert_model_parallel_size": 2}},
    "CP2": {"parallel": {"context_parallel_size": 2}},
}
"""Section `megatron` of a recipe, by name of the layout; what is absent (DP2, one rank) needs none."""
_LENGTHS = (60, 17, 129, 200, 64, 33, 90, 121)
_MICRO_BATCH_TOKENS = 256


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """One answer for each (layout, policy folder) of job["runs"], in policy.dtype job["dtype"]."""
    found = {}
    for number, (layout, policy) in enumerate(job["runs"]):
        if number:
            shutdown_parallel(keep_world=True)
        found[layout] = _one(layout, policy, job["dtype"], rendezvous)
    return found


def _one(layout: str, policy: str, dtype: str, rendezvous: FolderRendezvous) -> dict[str, Any]:
    recipe = Recipe.model_validate(
        {
            "name": "check",
            "steps": 1,
            "policy": {"path": policy, "dtype": dtype},
            "prompts": {"path": "none.jsonl"},
            "trainer": {"world_size": int(os.environ["WORLD_SIZE"]), "micro_batch_tokens": _MICRO_BATCH_TOKENS},
            # with a tiny epsilon, AdamW's first step is the gradient's sign: rounding would become steps
            "optimizer": {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
            "megatron": _CUTS.get(layout, {}),
        }
    )
    parallel = init_parallel(recipe, rendezvous)
    trainer = make_trainer(recipe, parallel)
    rows = _sequences()
    before = trainer.logprobs(rows)
    batches = pack(
        _samples(rows),
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=_MICRO_BATCH_TOKENS,
        pad_multiple=pad_multiple(parallel),
        policy_version=0,
    )
    report = trainer.step(batches[parallel.dp_rank])
    return {
        "before": list(chain(*before)),
        "after": list(chain(*trainer.logprobs(rows))),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
    }


def _sequences() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 60) for _ in range(size)] for size in _LENGTHS]


def _samples(rows: Sequence[Sequence[int]]) -> list[Sample]:
    return [_sample(index, row, len(rows)) for index, row in enumerate(rows)]


def _sample(index: int, row: Sequence[int], count: int) -> Sample:
    size = len(row) - 1
    rollout = Rollout(
        token_ids=tuple(row[1:]),
        rollout_logprobs=(-4.0,) * size,
        policy_versions=(0,) * size,
        loss_mask=(True,) * size,
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )
    weight = 1.0 / (count * size)
    return Sample(prompt_token_ids=(row[0],), rollout=rollout, advantage=1.0 - 0.3 * index, token_weight=weight)

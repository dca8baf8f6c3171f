"""What one trainer rank does to compare parallel layouts: log-probabilities, one step, log-probabilities again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megatron_scalerl.batching.packing import pack
from megatron_scalerl.check_gpu.cases import Case, case_of, samples
from megatron_scalerl.check_gpu.synthetic import bare_recipe
from megatron_scalerl.distributed.parallel import init_parallel, shutdown_parallel
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.trainer.step import make_trainer, pad_multiple

_CUTS: dict[str, dict[str, Any]] = {
    "TP2": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}},
    "PP2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "EP2": {"parallel": {"expert_model_parallel_size": 2}},
    "CP2": {"parallel": {"context_parallel_size": 2}},
}
"""Section `megatron` of a recipe, by name of the layout; what is absent (DP2, one rank) needs none."""
_LENGTHS = (59, 16, 128, 199, 63, 32, 89, 120)
_MICRO_BATCH_TOKENS = 256


def case_for(kind: str, *, toy: bool) -> Case:
    """The case of a family, cut into several micro-batches, of which each data-parallel rank gets some."""
    return replace(case_of(kind, toy=toy), lengths=_LENGTHS, micro_batch_tokens=_MICRO_BATCH_TOKENS)


def measure(job: Mapping[str, Any], rendezvous: FolderRendezvous) -> dict[str, Any]:
    """One answer for each layout of job["runs"], in policy.dtype job["dtype"].

    A run says layout, kind of policy, its folder, and the seed of its sequences.
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
        # with a tiny epsilon, AdamW's first step is the gradient's sign: rounding would become steps
        optimizer={"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3},
        megatron=_CUTS.get(layout, {}),
    )
    parallel = init_parallel(recipe, rendezvous)
    trainer = make_trainer(recipe, parallel)
    ids = case.token_ids()
    before = trainer.logprobs(ids)
    batches = pack(
        samples(ids, before),  # all ratios are 1, on every rank alike
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=case.micro_batch_tokens,
        pad_multiple=pad_multiple(parallel),
        policy_version=0,
    )
    report = trainer.step(batches[parallel.dp_rank])
    return {
        "before": [float(value) for value in chain(*before)],
        "after": [float(value) for value in chain(*trainer.logprobs(ids))],
        "loss": report.loss,
        "grad_norm": report.grad_norm,
    }

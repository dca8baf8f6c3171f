"""Weight updates from every layout of the trainer to engines of one and two workers, by real ranks over gloo.

Why this matters: the plan decides which rank sends which rectangle of which tensor; a rectangle in the wrong place
would be a policy that nobody trained. Compared bit for bit with the Hugging Face folder: a whole update, then two of
changes. Head and embedding have a padded vocabulary with tensor parallelism. The needs of the workers are halves of
every tensor, cut where no rank's part ends; those of vLLM's workers are in tests/engine/test_weight_update.py.

Not exercised: worlds of more than four ranks (tests/weights/test_owners.py plans those), NCCL.
"""

from itertools import product

import pytest
import random_policies
import torch
from runner import run_ranks
from safetensors.torch import load_file
from weight_ranks import VERSIONS, step
from weight_sizes import MOE, layout

from megatron_scalerl.distributed.rendezvous import private_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DENSE = ("llama", "llama_tied", "qwen2_tied")
SIZES = list(product((1, 2), repeat=4))
"""Tensor, pipeline, expert, context parallel."""
Sizes = tuple[int, int, int, int]


def cases(world, kinds, engines):
    """(kind, sizes, workers) that use all ranks."""
    found = []
    for kind in kinds:
        for tp, pp, ep, cp in SIZES:
            ranks = max(tp * cp, ep) * pp
            if ranks != world or (ep > 1 and kind in DENSE):
                continue
            found += [(kind, (tp, pp, ep, cp), workers) for workers in engines]
    return found


@pytest.mark.parametrize(
    ("world", "kinds", "engines"),
    [
        pytest.param(2, ("qwen2_tied", "qwen3_moe"), (2,), id="some"),
        *(pytest.param(n, (*DENSE, *MOE), (1, 2), id=f"all of {n}", marks=pytest.mark.full) for n in (1, 2)),
        *(pytest.param(4, (kind,), (1, 2), id=f"all of 4 {kind}", marks=pytest.mark.full) for kind in (*DENSE, *MOE)),
    ],
)
def test_every_layout_updates_every_worker_bit_for_bit(world, kinds, engines, tmp_path):
    every = cases(world, kinds, engines)
    for kind in {kind for kind, *_ in every}:
        random_policies.make(kind, tmp_path / kind)
    jobs = [(str(tmp_path / kind), layout(kind, *sizes), workers) for kind, sizes, workers in every]
    with private_folder() as rendezvous:
        found = run_ranks(world, "weight_ranks:updates", jobs, rendezvous)[0]
    for (kind, (tp, pp, ep, cp), workers), (versions, senders, changed, kept) in zip(every, found, strict=True):
        expected = load_file(tmp_path / kind / "model.safetensors")
        assert senders >= tp * pp and changed > 0 and kept > 0, (kind, tp, pp, ep, cp)
        check_versions(versions, expected, workers)


def check_versions(versions, expected, workers):
    """The workers of every version have the values, each by one worker, that steps from `expected` make."""
    assert len(versions) == VERSIONS
    for of_workers in versions:
        for name, values in expected.items():
            parts = [of_worker[name] for of_worker in of_workers]
            assert all(torch.equal(part[~part.isnan()], values[~part.isnan()]) for part in parts), name
            received = sum((~part.isnan()).int() for part in parts)
            once = received == 1 if workers == 1 or values.numel() > 1 else received >= 1
            assert bool(once.all()), (name, "every element by one worker")
            step(values)


WHOLE = {"use_distributed_optimizer": False}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_param_gather": True, "overlap_grad_reduce": True}
RECORDED = [
    ("llama_tied", (2, 1, 1, 1), SHARDED, 2, 4),
    ("llama", (1, 2, 1, 1), SHARDED, 1, 4),
    ("llama4", (2, 1, 1, 1), WHOLE, 2, 4),
    ("qwen3_moe", (1, 1, 2, 1), SHARDED, 2, 4),  # experts by one rank, the rest data parallel
    ("llama", (1, 1, 1, 1), WHOLE, 1, 4),  # two data-parallel ranks, each of which writes all
    ("llama", (1, 1, 1, 1), SHARDED, 1, 4),  # ... and each of which writes a shard
    ("llama", (1, 1, 1, 1), OVERLAPPED, 1, 1),  # ... of which one sends nothing
]
"""(Family; tensor, pipeline, expert, context parallel; keys of megatron.ddp; workers; most senders)."""


def test_changes_that_the_optimizer_records_update_every_worker_bit_for_bit(tmp_path):
    for kind in {kind for kind, *_ in RECORDED}:
        random_policies.make(kind, tmp_path / kind)
    jobs = [
        (
            str(tmp_path / kind),
            {**layout(kind, *sizes), "dtype": "bfloat16", "ddp": ddp, "most_senders": most_senders},
            workers,
        )
        for kind, sizes, ddp, workers, most_senders in RECORDED
    ]
    with private_folder() as rendezvous:
        ranks = run_ranks(2, "weight_ranks:updates", jobs, rendezvous)
    for (kind, _, _, workers, _), of_case in zip(RECORDED, zip(*ranks), strict=True):
        versions, _, changed, _ = of_case[0]
        assert changed > 0
        expected = {n: v.bfloat16() for n, v in load_file(tmp_path / kind / "model.safetensors").items()}
        check_versions(versions, expected, workers)
        assert [kept for *_, kept in of_case] == [0, 0], "nothing is compared"

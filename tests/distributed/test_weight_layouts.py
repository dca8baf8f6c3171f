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
from layouts import kind_of, layout_of
from runner import run_ranks
from safetensors.torch import load_file
from weight_ranks import VERSIONS, step

from megatron_scalerl.distributed.rendezvous import private_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DENSE = ("llama", "llama_tied", "qwen2_tied")
MOE = ("qwen3_moe", "qwen3_moe_tied", "llama4", "llama4_tied")


def rows(world, kinds):
    """Rows that use all ranks."""
    for kind, (tp, pp, ep, cp) in product(kinds, product((1, 2), repeat=4)):
        if max(tp * cp, ep) * pp == world and (ep == 1 or kind in MOE):
            words = [f"tp{tp}", f"pp{pp}", f"ep{ep}", f"cp{cp}"]
            words += ["sp"] * (tp > 1 and kind in MOE)  # Megatron's experts require it
            words += ["etp1"] * (tp > 1 and ep > 1)
            yield " ".join([kind, *words]), tp * pp


@pytest.mark.parametrize(
    "world, kinds, engines",
    [
        pytest.param(2, ("qwen2_tied", "qwen3_moe"), (2,), id="some"),
        *(pytest.param(n, (*DENSE, *MOE), (1, 2), id=f"all of {n}", marks=pytest.mark.full) for n in (1, 2)),
        *(pytest.param(4, (kind,), (1, 2), id=f"all of 4 {kind}", marks=pytest.mark.full) for kind in (*DENSE, *MOE)),
    ],
)
def test_every_layout_updates_every_worker_bit_for_bit(world, kinds, engines, tmp_path):
    every = [(row, least, workers) for row, least in rows(world, kinds) for workers in engines]
    for kind in {kind_of(row) for row, *_ in every}:
        random_policies.make(kind, tmp_path / kind)
    jobs = [(str(tmp_path / kind_of(row)), layout_of(row), workers) for row, _, workers in every]
    with private_folder() as rendezvous:
        found = run_ranks(world, "weight_ranks:updates", jobs, rendezvous)[0]
    for (row, least, workers), (versions, senders, changed, kept) in zip(every, found, strict=True):
        expected = load_file(tmp_path / kind_of(row) / "model.safetensors")
        assert senders >= least and changed > 0 and kept > 0, row
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


RECORDED = [
    ("llama_tied bf16 tp2", 2, 4),
    ("llama bf16 pp2", 1, 4),
    ("llama4 bf16 tp2 sp whole", 2, 4),
    ("qwen3_moe bf16 ep2", 2, 4),  # experts by one rank, the rest data parallel
    ("llama bf16 whole", 1, 4),  # two data-parallel ranks, each of which writes all
    ("llama bf16 sharded", 1, 4),  # ... and each of which writes a shard
    ("llama bf16 overlapped", 1, 1),  # ... of which one sends nothing
]
"""(Row, workers, most senders)."""


def test_changes_that_the_optimizer_records_update_every_worker_bit_for_bit(tmp_path):
    for kind in {kind_of(row) for row, *_ in RECORDED}:
        random_policies.make(kind, tmp_path / kind)
    jobs = [
        (str(tmp_path / kind_of(row)), {**layout_of(row), "most_senders": most_senders}, workers)
        for row, workers, most_senders in RECORDED
    ]
    with private_folder() as rendezvous:
        ranks = run_ranks(2, "weight_ranks:updates", jobs, rendezvous)
    for (row, workers, _), of_case in zip(RECORDED, zip(*ranks), strict=True):
        versions, _, changed, _ = of_case[0]
        assert changed > 0
        expected = {n: v.bfloat16() for n, v in load_file(tmp_path / kind_of(row) / "model.safetensors").items()}
        check_versions(versions, expected, workers)
        assert [kept for *_, kept in of_case] == [0, 0], "nothing is compared"

"""Bytes of single ranks in weight updates by real ranks over gloo, against the plan's count, to the byte.

Why this matters: that an update takes each rank its share alone is what lets a policy grow with its ranks, and the
report of a run says bytes. Counted is what each group was given to broadcast: by senders, and by workers as buffers
to receive into. On top of the plan's buckets these are the header of 5 numbers in each group, 8 bytes of digest
after each bucket that is sent, and in updates of changes 8 bytes of size before each.

Not exercised: NCCL; what gloo adds on the wire.
"""

from collections import Counter

import pytest
import random_policies
from layouts import kind_of, layout_of
from runner import run_ranks

from megatron_scalerl.distributed.rendezvous import private_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEADER, DIGEST, SIZE = 40, 8, 8
CASES = [("llama tp2", 2), ("qwen3_moe pp2 ep2", 1), ("llama4 tp2 sp ep2 etp1 cp2", 2)]
"""(Row, the rest of the four ranks data parallel; workers)."""


def check_transport(ranks, version):
    """What groups carried on either side is what was planned, and what senders say that they sent."""
    whole = version == 0
    received = ranks[0]["versions"][version]["received"]
    for rank in ranks:
        found = rank["versions"][version]
        own = [bucket for bucket in rank["buckets"] if bucket[0] == rank["sender"]]
        assert len(own) == len(found["sizes"])
        if whole:
            assert found["sizes"] == [nbytes for *_, nbytes in own]
        for shard, carried in found["sent"].items():
            sizes = [size for size, bucket in zip(found["sizes"], own) if bucket[1] == shard]
            expected = HEADER + sum(size + DIGEST for size in sizes if size) + (0 if whole else SIZE * len(sizes))
            assert carried == expected == received[shard][rank["sender"]]


def check_report(ranks, version):
    """(bytes, most sent by a rank, most received by a worker): the report of each rank says what was counted."""
    sent, received = Counter[int](), Counter[int]()
    for rank in ranks:
        own = [bucket for bucket in rank["buckets"] if bucket[0] == rank["sender"]]
        for size, (sender, shard, _) in zip(rank["versions"][version]["sizes"], own):
            sent[sender] += size
            received[shard] += size
    found = (sum(sent.values()), max(sent.values()), max(received.values()))
    reports = [rank["versions"][version]["report"] for rank in ranks]
    assert {(report.bytes, report.most_sent, report.most_received) for report in reports} == {found}
    return found


def test_senders_and_workers_carry_their_share_and_what_the_plan_counts(tmp_path):
    for row, _ in CASES:
        random_policies.make(kind_of(row), tmp_path / kind_of(row))
    jobs = [(str(tmp_path / kind_of(row)), layout_of(row), workers) for row, workers in CASES]
    with private_folder() as rendezvous:
        ranks = run_ranks(4, "weight_ranks:carried", jobs, rendezvous)
    for number, (_, workers) in enumerate(CASES):
        of_case = [rank[number] for rank in ranks]
        assert sorted(rank["sender"] for rank in of_case) == [0, 1, 2, 3]
        for version in range(len(of_case[0]["versions"])):
            check_transport(of_case, version)
            total, most_sent, most_received = check_report(of_case, version)
            if version == 0:
                assert most_sent <= 1.5 * total / 4 and most_received <= 1.1 * total / workers
            else:  # of one element in fifty, and of none
                assert (0 < total < 0.2 * of_case[0]["versions"][0]["report"].bytes) if version == 1 else total == 0

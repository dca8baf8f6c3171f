"""The bandwidth between ranks, over gloo: the same on every rank, and a slow link is named."""

import math
import re
from types import SimpleNamespace

import pytest
import random_policies
from bandwidth_ranks import SECONDS
from runner import run_ranks

from megatron_scalerl.distributed.bandwidth import BYTES, check_bandwidth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("hosts", "slowest"),
    [
        (["a", "b", "c"], r"rank 1 \(b\) to rank 2 \(c\) (\S+) GB/s, rank \d"),
        (["a", "a", "a"], r"rank 1 \(a\) to rank 2 \(a\) (\S+) GB/s, rank \d"),
        (["a", "a", "b"], r"rank [02] \([ab]\) to rank [02] \([ab]\) (\S+) GB/s, rank [02] \([ab]\) to rank [02]"),
    ],
    ids=["a rank a host", "one host", "one rank of each host is in the ring"],
)
def test_it_is_the_same_on_every_rank_and_the_slowest_link_is_named(tmp_path, hosts, slowest):
    random_policies.make("llama", tmp_path / "policy")
    found = run_ranks(3, "bandwidth_ranks:measure", str(tmp_path / "policy"), hosts)
    assert len(set(found)) == 1
    rate, said = found[0]
    assert 0.001 < rate < 1000
    start = "trainer.min_all_reduce_gb_s: expected at least 1e+06 GB/s over 3 ranks, found "
    assert said.startswith(start) and "\n" not in said
    link = re.search(f"slowest links: {slowest}", said)
    assert link, said
    if "b\\) to rank 2 \\(c" in slowest:
        assert 0 < float(link[1]) <= 1.01 * BYTES / SECONDS / 1e9


def test_one_rank_has_no_network():
    assert check_bandwidth(SimpleNamespace(world_size=1), 1e6) == math.inf

"""Bytes of one rank in a weight update, counted in the plan's own buckets: they fall with the number of ranks.

Layouts of up to 16 ranks here; `python tools/weight_scaling.py --count` counts those of up to 64 and prints them.
"""

from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "weight_scaling.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sent", "replicated"),
    [
        ("8B, dense", 1.01, 0.0001),
        ("30B, 128 experts (Qwen3)", 1.01, 0.001),
        ("17B x 16 (Scout), 108B", 1.01, 0.0001),
    ],
)
def test_no_rank_sends_and_no_worker_gets_much_more_than_an_even_share(bench, name, sent, replicated):
    counted = [bench.count(bench.COUNTED[name], layout, 256) for layout in bench.LAYOUTS[:3]]
    for found, (ranks, *_, engine_tp) in zip(counted, bench.LAYOUTS):
        work = found.work
        assert work.senders == ranks == len(work.sent) and len(work.received) == engine_tp
        # every byte of the policy once, and norms and routers once for each worker; alignment is the rest
        everything = found.total + (engine_tp - 1) * found.replicated
        assert sum(work.sent.values()) == sum(work.received.values()) == pytest.approx(everything, rel=1e-5)
        assert found.replicated <= replicated * found.total
        assert 1 <= found.sent_over <= sent and 1 <= found.received_over <= 1.002
    first, *_, last = (found.work for found in counted)
    assert last.most_sent <= sent * first.most_sent / 4 and last.most_received <= 1.002 * first.most_received / 4

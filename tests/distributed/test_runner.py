"""The runner of the multi-process tests: results by rank, and failures that name the rank.

Why this matters: a runner that loses a rank's failure makes every distributed test pass.
"""

import pytest
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_results_come_by_rank_and_every_rank_knows_its_place():
    assert run_ranks(3, "runner_targets:place", "here") == [("here", str(rank), "3", "1") for rank in range(3)]


@pytest.mark.parametrize(
    "target, message",
    [
        ("rank_one_fails", r"rank 1:\nTraceback(.|\n)*ValueError: shapes differ: 3 and 4"),
        ("rank_one_dies", "rank 1:\nprocess ended without an answer"),
    ],
)
def test_a_failing_rank_ends_all_and_is_named(target, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, f"runner_targets:{target}")


def test_the_time_limit_names_who_still_ran():
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] were still running at the time limit"):
        run_ranks(2, "runner_targets:wait_for_ever", timeout_s=1.0)

"""The record of episodes: when it warns, when it ends the run, and that the page has the ends of the code."""

import logging
import re
from pathlib import Path

from megatron_scalerl.environments.episode_record import EpisodeRecord
from megatron_scalerl.types import ENDS

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def ended(record, row, problem=""):
    """An episode of a row; what ends the run."""
    fate = record.begin_episode(b"%d" % row)
    fate.problem = problem
    fate.actions = f"of row {row}"
    return record.record_end(fate)


def test_a_lost_share_above_a_twentieth_is_said_with_its_first_traceback_and_again_when_it_doubles(caplog):
    caplog.set_level(logging.WARNING)
    record = EpisodeRecord("environment.name 'm:C'")
    counts = []
    for number in range(400):
        before = len(caplog.messages)
        assert ended(record, number, f"Traceback\nboom {number}" if number % 5 == 0 else "") is None
        if len(caplog.messages) > before:
            counts.append(number // 5 + 1)
    assert counts == [13, 26, 52]
    first = caplog.messages[0]
    assert "environment.name 'm:C': 13 of the latest 61 episodes are lost. The first lost episode, of row 0," in first
    assert "boom 0\n" in first and "return an observation" in first and 'repeated_failure = "wrong"' in first
    for number in range(400, 700):
        ended(record, number)
    for number in range(13):
        ended(record, number, "boom again")
    assert len(caplog.messages) == 4, "a later outage is said as well"


def test_the_run_ends_by_many_rows_and_not_by_a_few_that_always_fail():
    record = EpisodeRecord("m:C")
    for row in range(32):
        record.begin_episode(b"%d" % row)
    few = [ended(record, number % 7, "boom") for number in range(255)]
    assert few == [None] * 255, "episodes of other rows have begun, and not ended yet"
    record = EpisodeRecord("m:C")
    few = [
        ended(record, max(0, number - 9), "boom" if number < 10 else "") for _ in range(20) for number in range(18)
    ]
    assert few == [None] * 360, "10 of 18 episodes, of one row of nine"
    record = EpisodeRecord("m:C")
    ends = [ended(record, number % 8, "Traceback\nboom") for number in range(64)]
    assert ends[:-1] == [None] * 63
    assert str(ends[-1]) == "64 episodes in a row could not be made, the last: boom"
    record = EpisodeRecord("m:C")
    ends = [ended(record, number // 16, "boom" if number % 2 else "") for number in range(400)]
    assert ends == [None] * 400, "a half is not more than a half"
    assert "129 of the last 256 episodes could not be made" in str(
        ended(record, 3, "boom") or ended(record, 4, "boom")
    )


def test_others_succeed_while_fewer_than_half_of_the_episodes_of_other_rows_fail():
    record = EpisodeRecord("m:C")
    assert not record.others_succeed(b"a"), "nothing is known"
    for row in range(5):
        ended(record, row)
    for row in range(10, 15):
        record.record_try(record.begin_episode(b"%d" % row), failed=True)
    assert not record.others_succeed(b"a") and record.others_succeed(b"10")
    again = record.begin_episode(b"15")
    record.record_try(again, failed=True)
    record.record_try(again, failed=False)
    assert record.others_succeed(b"a"), "what succeeds at a later try has not failed"


def test_the_table_of_the_page_is_that_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(reason, by) for reason, by, _ in rows] == [(end.reason, end.by) for end in ENDS.values()]
    for reason, by, outcome in rows:
        assert ("lost" not in outcome) == ENDS[reason].paid
        assert ("wrong by a class" in outcome) == ((by == "class" and reason != "silent") or reason == "hung")
        assert ("leave the row out" in outcome) == (by == "row")

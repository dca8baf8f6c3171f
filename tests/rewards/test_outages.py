"""Outages: what could not be made ends the pool where it is more than half."""

from megatron_scalerl.rewards.outages import RECENT, Outages


def test_more_than_half_of_the_recent_ends_the_pool():
    outages = Outages("checks")
    ends = [outages.ended("" if n % 2 else "503") for n in range(RECENT)]
    assert ends == [None] * RECENT
    assert "129 of the last 256 checks" in str(outages.ended("503") or outages.ended("503"))

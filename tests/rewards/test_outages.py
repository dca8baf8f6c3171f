"""Outages: what one row alone does is no outage, and what many do ends the pool."""

from megatron_scalerl.rewards.outages import MAX_UNAVAILABLE, MOST_ENDS, RECENT, Outages


def test_one_bad_row_neither_hides_another_nor_ends_the_pool():
    outages = Outages("episodes", enough=20)
    for _ in range(100):
        outages.tried(False)
    for row in (b"a", b"b"):
        for _ in range(48):
            outages.tried(True, row)
            assert outages.ended("it raised", row) is None
        # 3 of 103 tries of others failed, whatever the other row did
        assert outages.alone(b"a") and outages.alone(b"b")


def test_the_failures_of_many_rows_are_an_outage():
    outages = Outages("episodes", enough=20)
    for _ in range(100):
        outages.tried(False)
    for row in range(12):
        outages.tried(True, b"%d" % row)
    assert not outages.alone(b"another")
    rows = [b"%d" % (n % 8) for n in range(8 * MOST_ENDS)]
    ends = [outages.ended("it raised", row) for row in rows]
    assert ends[:-1] == [None] * (MAX_UNAVAILABLE - 1) and "64 episodes in a row" in str(ends[-1])


def test_more_than_half_of_the_recent_ends_the_pool():
    outages = Outages("checks")
    ends = [outages.ended("" if n % 2 else "503") for n in range(RECENT)]
    assert ends == [None] * RECENT
    assert "129 of the last 256 checks" in str(outages.ended("503") or outages.ended("503"))

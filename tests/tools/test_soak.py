"""The soak's figures: what grows by hour, and how long no step was made."""

import pytest
from soak import longest_pause_s, measured, plot, size_of, slopes


def sample(number, *, pid=1, **changes):
    """One every five seconds: a file more every minute, 36 MiB more an hour, and every tenth is off."""
    seconds = 5.0 * number
    off = 500.0 * (number % 10 == 0)
    row = {"seconds": seconds, "pid": pid, "rss_mib": 400.0 + off, "threads": 14, "steps": number}
    return row | {"files": 60 + seconds / 60, "disk_mib": seconds / 100 + off} | changes


def test_slopes_are_of_the_longest_controller_and_robust():
    rows = [sample(n) for n in range(400)] + [sample(n, pid=2, rss_mib=1e6) for n in range(400, 500)]
    used = measured([*rows, {"seconds": 7.0, "kill": "trainer-0", "signal": "SIGKILL"}])
    assert {row["pid"] for row in used} == {1} and used[0]["seconds"] == 600.0
    assert slopes(used) == {
        "rss_mib": "+0.000 percent per hour",
        "files": "+60.000 count per hour",
        "threads": "+0.000 count per hour",
        "disk_mib": "+36.000 MiB per hour",
    }


def test_memory_is_in_percent_of_its_median():
    rows = [sample(n, rss_mib=400.0 + 40.0 * (5.0 * n - 1000) / 3600) for n in range(121, 280)]
    assert float(slopes(rows)["rss_mib"].split()[0]) == pytest.approx(10.0, abs=0.01)


def test_too_few_samples_give_no_slope():
    assert slopes(measured([sample(n) for n in range(130)]))["files"].startswith(
        "too few samples after minute 10: 10,"
    )
    assert measured([]) == [] and longest_pause_s([]) == 0.0


def test_the_longest_pause_begins_with_the_last_step_before_it():
    steps = [0, 0, 1, 2, 2, 2, 3, 3]
    assert longest_pause_s([sample(n, steps=made) for n, made in enumerate(steps)]) == 15.0


def test_the_figure_is_drawn_and_links_count_themselves(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere")
    assert 0 < size_of(tmp_path) < 1
    plot([sample(n) for n in range(3)] + [{"seconds": 7.0, "kill": "x", "signal": "SIGSTOP"}], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000

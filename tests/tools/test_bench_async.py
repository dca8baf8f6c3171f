"""The benchmark of k = 8 against k = 0: interleaved, resumable, with the spread over rounds."""

import json
import sys

import bench_async
import pytest

FAST, BEST = bench_async.ASYNCHRONOUS, bench_async.SYNCHRONOUS[1]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Calls the program and returns (what it printed, the settings that ran). Stand-in runs take a drawn time."""
    policy = tmp_path / "tiny" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    out = tmp_path / "new" / "out.jsonl"
    ran = []

    def stand_in(tiny, setting, steps, skip):
        arm = next(name for name, value in bench_async.ARMS.items() if value == setting)
        ran.append(arm)
        slowdown = 1 + (len(ran) - 1) // len(bench_async.ARMS)  # another load in each round
        return slowdown * {FAST: 1.0, BEST: 1.5}.get(arm, 2.0)

    monkeypatch.setattr(bench_async, "step_seconds", stand_in)

    def call(capsys, *options):
        ran.clear()
        argv = ["bench_async.py", "--tiny", str(tmp_path / "tiny"), "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", argv)
        bench_async.main()
        return json.loads(capsys.readouterr().out), list(ran)

    call.out = out
    return call


def test_a_load_that_changes_between_rounds_does_not_change_the_ratio(runs, capsys):
    found, ran = runs(capsys, "--rounds", "4")
    assert (found["ratio"]["min"], found["ratio"]["median"], found["ratio"]["max"]) == (1.5, 1.5, 1.5)
    assert found["k0_best"] == BEST
    assert found["steps_per_hour"][FAST] == {
        "median": 1500.0,
        "q1": 1125.0,
        "q3": 2250.0,
        "min": 900.0,
        "max": 3600.0,
    }
    rounds = [ran[i : i + 4] for i in range(0, 16, 4)]
    assert all(set(one) == set(bench_async.ARMS) for one in rounds)
    assert [one[0] for one in rounds] == list(bench_async.ARMS), "each round begins with another arm"


def test_it_goes_on_where_it_was_stopped(runs, capsys):
    runs(capsys, "--rounds", "1")
    lines = runs.out.read_text().splitlines(keepends=True)
    runs.out.write_text("".join(lines[:2]) + lines[2][:20])
    found, ran = runs(capsys, "--rounds", "2")
    assert len(ran) == 2 + 4
    assert found["rounds"] == 2
    assert runs(capsys, "--rounds", "2")[1] == []


def test_runs_with_other_settings_are_not_mixed(runs, capsys):
    runs(capsys, "--rounds", "1")
    with pytest.raises(ValueError, match=r"out.jsonl line 1: expected a run with .*'steps': 9.* found .*'steps': 16"):
        runs(capsys, "--rounds", "1", "--steps", "9")
    runs.out.write_text("[]\n")
    with pytest.raises(ValueError, match=r"out.jsonl line 1: expected a run of this benchmark, found TypeError"):
        runs(capsys, "--rounds", "1")

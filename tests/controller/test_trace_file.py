"""The file of a window of steps, by a whole controller in virtual time: stand-in trainer and engine, real spans."""

import os

import pytest
import trace_checks
from fakes.run import Killed, attempt, recipe
from fakes.trainer import StandInTrainer
from trace_checks import encloses, named

from megatron_scalerl.controller import trace_file
from megatron_scalerl.controller.trace_file import trace_files
from megatron_scalerl.processes import spans


def run(folder, window, *, step=0, **options):
    """An attempt of the run in `folder` that records a window; the names of the files of its traces."""
    settings = recipe(folder, telemetry={"trace_steps": window})
    sinks = trace_files(settings, folder / "r", step=step)
    outcome = attempt(settings, sinks=sinks, **options)
    return outcome, sorted(path.name for path in (folder / "r" / "trace").glob("*"))


def test_a_window_is_recorded_from_its_first_wait_to_its_last_update(tmp_path):
    _, files = run(tmp_path, [3, 4])
    assert files == ["steps_3_4.json"]
    made = trace_checks.read(tmp_path / "r" / "trace" / "steps_3_4.json")
    assert made["otherData"]["steps"] == [3, 4] and made["otherData"]["run"] == "r"
    assert made["otherData"]["dropped_spans"] == 0
    waits, batches = named(made, "wait for groups"), named(made, "batch")
    # the record of a step is written within its batch: of the one before, the end is in the window
    assert len(batches) == 3 and [b["args"] for b in batches] == [{}, {}, {"unfinished": 1}]
    assert waits and all(any(encloses(b, e) for b in batches) for e in named(made, "wait for the batch ahead"))
    assert [e["args"] for e in named(made, "validation")], "the one of version 2"
    assert all(any(encloses(b, e) for b in batches) for e in named(made, "wait for a validation"))
    packed = [event["args"]["step"] for event in named(made, "packing")]
    assert set(packed) >= {4} and set(packed) <= {3, 4, 5}
    assert spans.span("x") is spans.span("y"), "nothing is recorded after it"


def test_a_run_that_ends_within_the_window_writes_what_it_has(tmp_path):
    outcome, files = run(tmp_path, [4, 9])
    assert outcome.reason == "all 6 steps are made" and files == ["steps_4_6.json"]
    trace_checks.read(tmp_path / "r" / "trace" / "steps_4_6.json")


def test_a_trainer_that_fails_within_the_window_leaves_what_came_before(tmp_path, monkeypatch):
    step = StandInTrainer.step

    async def fails(self, number):
        if number == 5:
            raise RuntimeError("a rank is gone")
        return await step(self, number)

    monkeypatch.setattr(StandInTrainer, "step", fails)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        run(tmp_path, [4, 6])
    [path] = (tmp_path / "r" / "trace").iterdir()
    assert path.name == "steps_4_4.json"
    errors = [e["args"].get("error") for e in trace_checks.read(path)["traceEvents"] if e["ph"] == "X"]
    assert "RuntimeError" in errors


def test_a_kill_while_it_is_written_leaves_no_file(tmp_path, monkeypatch):
    """Half of the bytes are on the disk then, under a name that nobody reads."""

    def torn(handle, data):
        os.truncate(handle, 0)
        write(handle, bytes(data)[: len(data) // 2])
        raise Killed

    write = os.write
    [made] = trace_files(recipe(tmp_path, telemetry={"trace_steps": [1, 1]}), tmp_path, step=0)
    with spans.span("something"):
        pass
    recorder = made._recorder
    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(Killed):
        made._write(recorder.drain(), recorder)
    monkeypatch.undo()
    made.close()
    assert [path.name for path in (tmp_path / "trace").iterdir()] == [".steps_1_0.json.draft"]


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(trace_file, "write_durably", full)
    outcome, files = run(tmp_path, [3, 4])
    assert outcome.reason == "all 6 steps are made" and files == []
    assert "the trace is not written: " in caplog.text and "steps_3_4.json" in caplog.text


def test_a_window_that_is_on_the_disk_or_over_is_not_recorded_again(tmp_path):
    settings = recipe(tmp_path, telemetry={"trace_steps": [3, 4]})
    folder = tmp_path / "r"
    assert trace_files(settings, folder, step=4) == ()
    (folder / "trace").mkdir(parents=True)
    (folder / "trace" / "steps_3_4.json").touch()
    assert trace_files(settings, folder, step=0) == ()
    (folder / "trace" / "steps_3_4.json").unlink()
    [made] = trace_files(settings, folder, step=0)
    made.close()
    assert list((folder / "trace").iterdir()) == [], "no step of the window was made"


def test_a_window_the_wrong_way_round_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"telemetry.trace_steps: the first step 5 comes after the last one, 4"):
        recipe(tmp_path, telemetry={"trace_steps": [5, 4]})

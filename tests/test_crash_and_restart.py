"""A run that is killed and resumed: its compute axis, its records, its batches.

Real controller, journal, ledger, metrics and folder in virtual time; `fakes.run` has the stand-ins.
"""

import itertools
import os
from pathlib import Path

import pytest
from fakes.run import PUBLISH_S, START_S, VALIDATE_S, attempt, check_records, recipe
from fakes.trainer import SAVE_S
from sampling import sampled
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_scalerl.checkpoints.commit import committed
from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.meter import HEARTBEAT_S
from megatron_scalerl.controller.run_folder import resume_point
from megatron_scalerl.rollouts.history import read_groups, read_history

DEVICES = 3


def curve(folder):
    """Step -> device-seconds on the forecast's axis, at each step and each validation."""
    steps = {r["step"]: 3600 * r["device_hours"] for r in read_jsonl(folder / "metrics.jsonl")}
    validations = {r["step"]: 3600 * r["compute"] for r in read_jsonl(folder / "validation.jsonl")}
    return steps, validations


def charges(folder, *roles):
    """The charges to these roles in a run's ledger."""
    return [r for r in read_jsonl(folder / "ledger.jsonl")[1:] if r.get("role") in roles]


def at_k(k, folder, **changes):
    return recipe(folder, rollouts={"max_staleness_steps": k}, **changes)


def finish(settings, **options):
    """An attempt that makes the last of the steps, with whole records."""
    outcome = attempt(settings, **options)
    assert outcome.reason == f"all {settings.steps} steps are made"
    if settings.steps == 6:
        check_records(Path(settings.run_dir))
    return outcome


def check_curve(folder, whole):
    """The axis ascends, and is at most what one completion takes (6 s) apart from that of a run without a crash."""
    for found, expected in zip(curve(folder), curve(whole)):
        values = [found[step] for step in sorted(found)]
        assert values == sorted(values)
        assert all(abs(found[step] - expected[step]) <= DEVICES * 6 + 1e-6 for step in expected)


def held(folder):
    return sum(3600 * r["hours"] for r in read_jsonl(folder / "ledger.jsonl")[1:] if "role" in r)


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory):
    """Folder of a run without a crash, by k."""
    folders = {}
    for k in (0, 2):
        root = tmp_path_factory.mktemp(f"whole{k}")
        settings = at_k(k, root)
        outcome = finish(settings)
        assert held(root / "r") == pytest.approx(DEVICES * outcome.seconds, abs=1e-3)
        folders[k] = root / "r"
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(
    "k, at_s", sampled("save and exit", itertools.product([0, 2], [START_S + 1.5 * n for n in range(17)]), 4)
)
def test_a_run_that_is_asked_to_save_and_exit_repeats_no_step(tmp_path, uncrashed, k, at_s):
    """The step in progress is finished, with the validation that its weight update waits for, and saved.

    Whatever else was in progress is cancelled.
    """
    settings = at_k(k, tmp_path)
    first = attempt(settings, save_at_s=at_s)
    start = resume_point(tmp_path / "r")
    assert first.reason is None and first.seconds < at_s + VALIDATE_S + PUBLISH_S + SAVE_S + 0.01
    assert start.step == max(first.trained, default=0)
    saves = read_jsonl(tmp_path / "r/checkpoints.jsonl")
    assert all(row["seconds"] == SAVE_S for row in saves) and bool(saves) == bool(start.step)
    assert [*first.trained, *finish(settings).trained] == list(range(1, 7))
    if k == 0:  # nothing is generated during a step; what was in flight is generated again
        steps, whole = curve(tmp_path / "r")[0], curve(uncrashed[0])[0]
        assert all(steps[step] >= whole[step] - 1e-3 for step in whole)
        batches = [b.group_ids for b in read_history(tmp_path / "r").batches]
        assert batches == [b.group_ids for b in read_history(uncrashed[0]).batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, inside_s, power_loss",
    sampled(
        "crash in a step",
        [(step, *crash) for step in range(1, 7) for crash in ((0.1, False), (1.9, False), (2.1, False), (1.9, True))],
        3,
    ),
)
def test_a_crash_in_any_step_does_not_change_the_curve(tmp_path, uncrashed, step, inside_s, power_loss):
    """k = 0: nothing is generated during a step, so nothing has to be generated again.

    inside_s: seconds after the batch of the step was composed: in the optimizer step, or in the weight update.
    """
    settings = at_k(0, tmp_path)
    begins = charges(uncrashed[0], "startup", "trainer")
    at = sum(r["seconds"] for r in itertools.takewhile(lambda r: r["phase"] != "train" or r["batch"] < step, begins))
    first = attempt(settings, kill_at_s=at + inside_s, power_loss=power_loss)
    assert first.reason is None
    finish(settings)
    for found, expected in zip(curve(tmp_path / "r"), curve(uncrashed[0])):
        assert found == pytest.approx(expected, abs=1e-3)
    lost = sum(3600 * r["hours"] for r in charges(tmp_path / "r", "lost"))
    replayed = DEVICES * 2.25 * (step - 1 if step <= 3 else step - 4)
    assert power_loss or replayed - 1e-3 <= lost <= replayed + DEVICES * (inside_s + 3.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "power_loss, async_save, at_s",
    sampled("crash", itertools.product([False, True], [False, True], [0.5 + 1.3 * i for i in range(25)]), 8),
)
def test_a_crash_at_any_moment_costs_at_most_the_repeated_work(tmp_path, uncrashed, at_s, async_save, power_loss):
    """k = 2: completions in flight are discarded and generated again; the axis grows by no more than their time.

    The window at the crash is lost, with the completions finished in it. A power loss truncates every file to its
    last synced length.
    """
    settings = recipe(tmp_path, checkpoint={"async_save": async_save})
    first = attempt(settings, kill_at_s=at_s, power_loss=power_loss)
    second = finish(settings)
    check_curve(tmp_path / "r", uncrashed[2])
    if power_loss:
        return
    batches = {b.step: {(g, i) for g in b.group_ids for i in range(4)} for b in read_history(tmp_path / "r").batches}
    assert {step: sent for outcome in (first, second) for step, sent in outcome.completions.items()} == batches
    total = DEVICES * (first.seconds + second.seconds)
    assert total - DEVICES * HEARTBEAT_S - 1e-3 <= held(tmp_path / "r") <= total + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("async_save", sampled("write", [False, True], 1))
def test_a_crash_at_any_write_is_survived(tmp_path, uncrashed, async_save):
    """Killed in its n-th write, for every n: groups, batches and records are complete."""
    killed_in, checkpoint = set(), {"async_save": async_save, "every_steps": 2 if async_save else 3}
    for write in itertools.count():
        settings = recipe(tmp_path, name=f"r{write}", steps=3, checkpoint=checkpoint)
        first = attempt(settings, kill_at_write=write)
        if first.reason is not None:
            break
        killed_in.add(first.killed_in)
        finish(settings)
        folder = tmp_path / f"r{write}"
        assert [r["batches"] for r in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3]
        groups = [g for b in read_history(folder).batches for g in b.group_ids]
        assert len(set(groups)) == len(groups) == 6
        assert [r["step"] for r in read_jsonl(folder / "validation.jsonl")] == [0, 2, 3]
        axis = curve(folder)[0]
        assert axis[1] < axis[2] < axis[3]
        expected = curve(uncrashed[2])[0]
        assert all(abs(axis[step] - expected[step]) <= DEVICES * 6 for step in axis)
    assert write > 50
    files = {
        "segment-00000.bin",
        "journal.jsonl",
        "ledger.jsonl",
        "metrics.jsonl",
        ".COMMIT.draft",
        ".recipe.yaml.draft",
    }
    assert killed_in >= files


def test_records_before_a_checkpoint_are_on_disk_before_it(tmp_path, uncrashed):
    """Power loss just after the checkpoint of step 3: its batches are neither trained on nor charged again."""
    settings = at_k(0, tmp_path)
    at = sum(r["seconds"] for r in charges(uncrashed[0], "startup", "trainer") if r["batch"] <= 3)
    attempt(settings, kill_at_s=at + SAVE_S + 0.1, power_loss=True)
    finish(settings)
    assert curve(tmp_path / "r")[0][3] == pytest.approx(curve(uncrashed[0])[0][3], abs=1e-3)
    until = sum(3600 * r["hours"] for r in charges(tmp_path / "r", "trainer", "engine") if r["batch"] <= 3)
    assert until == pytest.approx(curve(uncrashed[0])[0][3], abs=1e-3)


@pytest.mark.parametrize("every_steps", [1, 2, 3])
def test_an_asynchronous_checkpoint_stops_nothing(tmp_path, every_steps):
    """It is committed after a later step, or at the end; a save takes 0.5 s, a step 2 s, the last validation 3 s."""
    seconds = {}
    for async_save in (False, True):
        (root := tmp_path / str(async_save)).mkdir()
        checkpoint = {"every_steps": every_steps, "keep": 9, "async_save": async_save}
        outcome = finish(recipe(root, checkpoint=checkpoint))
        rows = read_jsonl(root / "r/checkpoints.jsonl")
        assert [row["step"] for row in rows] == list(range(every_steps, 7, every_steps))
        assert [step for step, _ in committed(root / "r/checkpoints")] == [row["step"] for row in rows]
        assert all(row["seconds"] == SAVE_S for row in rows)
        assert {row["stopped_seconds"] for row in rows} == {0.0 if async_save else SAVE_S}
        seconds[async_save] = outcome.seconds
    assert seconds[True] <= seconds[False]


def test_a_save_that_outlasts_the_steps_delays_the_next_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("fakes.trainer.SAVE_S", 5.0)
    checkpoint = {"every_steps": 1, "keep": 9, "async_save": True}
    finish(recipe(tmp_path, checkpoint=checkpoint))
    assert [step for step, _ in committed(tmp_path / "r/checkpoints")] == list(range(1, 7))


@pytest.mark.slow
def test_two_crashes_are_no_worse_than_one(tmp_path, uncrashed):
    settings = at_k(0, tmp_path)
    assert attempt(settings, kill_at_s=30).reason is None
    assert attempt(settings, kill_at_s=START_S + 4).reason is None, "in the replay"
    finish(settings)
    check_curve(tmp_path / "r", uncrashed[0])


def test_restarting_a_finished_run_records_nothing_twice(tmp_path):
    settings = recipe(tmp_path, steps=5)
    attempt(settings)
    before = {p.name: p.read_text() for p in (tmp_path / "r").glob("*.jsonl")}
    again = attempt(settings)
    assert again.reason == "all 5 steps are made" and again.trained == []
    assert (tmp_path / "r/validation.jsonl").read_text() == before["validation.jsonl"]
    assert (tmp_path / "r/metrics.jsonl").read_text() == before["metrics.jsonl"]
    assert [r["step"] for r in read_jsonl(tmp_path / "r/validation.jsonl")] == [0, 2, 4, 5]


def test_a_finished_run_resumes_when_steps_is_raised(tmp_path, uncrashed):
    attempt(at_k(0, tmp_path, steps=4))
    finish(at_k(0, tmp_path))
    found, expected = curve(tmp_path / "r")[0], curve(uncrashed[0])[0]
    # the end of the first attempt adds its checkpoint and the time of its last validation, which nothing overlaps
    assert all(0 <= found[step] - expected[step] <= DEVICES * (SAVE_S + VALIDATE_S) for step in expected)


@pytest.mark.slow
def test_skipped_batches_after_a_checkpoint_are_recorded_once(tmp_path):
    """Batches 3 and 4 have no variance and follow the checkpoint of step 3, which is 3 batches old."""
    settings = at_k(0, tmp_path)
    flat = {6, 7, 8, 9}
    assert attempt(settings, flat_groups=flat).reason == "all 6 steps are made"
    whole = [(r["batches"], r["step"], "skipped" in r) for r in read_jsonl(tmp_path / "r/metrics.jsonl")]
    assert whole == [
        (1, 1, False),
        (2, 2, False),
        (3, 3, False),
        (4, 3, True),
        (5, 3, True),
        (6, 4, False),
        (7, 5, False),
        (8, 6, False),
    ]
    expected = curve(tmp_path / "r")
    again = at_k(0, tmp_path, name="again")
    assert attempt(again, flat_groups=flat, kill_at_s=48).reason is None
    assert len(read_history(tmp_path / "again").batches) > 5
    attempt(again, flat_groups=flat)
    found = [(r["batches"], r["step"], "skipped" in r) for r in read_jsonl(tmp_path / "again/metrics.jsonl")]
    assert found == whole
    assert curve(tmp_path / "again")[1][2] == pytest.approx(expected[1][2], abs=1e-3)
    events = EventAccumulator(str(tmp_path / "again/tensorboard")).Reload()
    assert [e.step for e in events.Scalars("reward")] == [step for _, step, _ in whole]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "none of the first 8 completions that end closes its thinking with '</think>', so no answer can"),
        ({"sft": {"path": "warm.jsonl"}}, "had nothing left to train on"),
        ({"prompts": {"think_start": "", "think_end": ""}}, "had nothing left to train on"),
    ],
)
def test_a_first_batch_in_which_no_thinking_is_closed_ends_the_run(tmp_path, settings, message):
    """Nothing has taught the policy the tags."""
    settings = {"prompts": {"think_start": "<think>", "think_end": "</think>"}} | settings
    made = at_k(0, tmp_path, filters={"max_empty_batches": 2}, **settings)
    with pytest.raises(RuntimeError, match=message):
        attempt(made, answers=False)


def test_a_run_with_nothing_left_to_train_on_gives_up_without_a_step_and_says_so(tmp_path):
    settings = at_k(0, tmp_path, filters={"max_empty_batches": 2})
    said = "gave up at step 2 of 6: 2 batches in a row had nothing left to train on: 2 of 2 groups all "
    with pytest.raises(RuntimeError, match=said):
        attempt(settings, flat_groups=range(4, 99))
    [end] = read_jsonl(tmp_path / "r/end.json")
    assert end["reason"].startswith(said) and end["gave_up"] and not end["final"] and end["step"] == 2
    assert resume_point(tmp_path / "r").step == 2
    skipped = read_jsonl(tmp_path / "r/metrics.jsonl")[2:]
    assert [(r["step"], r["skipped"], r["batch/samples"], r["batch/groups"]) for r in skipped] == [(2, 1, 0, 2)] * 2
    batches = read_history(tmp_path / "r").batches
    assert [(b.batch, b.step, b.policy_version) for b in batches] == [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 3, 2)]
    assert attempt(settings).reason == "all 6 steps are made", "the same command may go on"
    [end] = read_jsonl(tmp_path / "r/end.json")
    assert not end["gave_up"]


def test_a_journal_behind_its_checkpoint_is_refused(tmp_path):
    settings = recipe(tmp_path)
    attempt(settings, kill_at_s=26)
    path = tmp_path / "r/journal.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[: len(rows) // 4]))
    with pytest.raises(RuntimeError, match=r"journal.jsonl: has \d batches, and had 3 when .*step_000003"):
        attempt(settings)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    settings = recipe(tmp_path)
    attempt(settings)
    folder = tmp_path / "r"
    newest = folder / "checkpoints/step_000006/controller.json"
    whole = newest.read_bytes()
    newest.write_bytes(whole.replace(b'"step": 6', b'"step": 9'))  # same size, other content
    point = resume_point(folder)
    assert (point.step, point.batches) == (3, 3)
    assert "step_000006/controller.json: the content has changed" in point.damaged[0]
    assert finish(settings).trained == [4, 5, 6]
    assert resume_point(folder).step == 6
    for file in folder.glob("checkpoints/*/controller.json"):
        file.write_bytes(b"{")
    with pytest.raises(RuntimeError, match=r"every checkpoint is damaged: .*step_000006"):
        resume_point(folder)


def test_lost_completions_leave_their_group_and_nothing_else(tmp_path):
    """One of group 0 is lost, and all of group 1 once: it is generated again."""
    settings = at_k(0, tmp_path)
    lost = {(1, 0, 2): 1} | {(1, 1, index): 1 for index in range(4)}
    finish(settings, lost=lost)
    groups = read_groups(tmp_path / "r", read_history(tmp_path / "r"), (0, 1))
    assert len(groups[0].completions) == 3 and groups[0].lost_completions == 1
    assert [s.correct for s in groups[0].scores] == [True, False, False]
    assert len(groups[1].completions) == 4 and groups[1].lost_completions == 0
    records = read_jsonl(tmp_path / "r/metrics.jsonl")
    assert [r["lost_completions"] for r in records] == [1, 0, 0, 0, 0, 0]
    assert [r.get("lost/no_logprobs") for r in records] == [1.0, *[None] * 5]
    event = next(e for e in read_jsonl(tmp_path / "r/journal.jsonl") if e["event"] == "finish")
    assert event["group_id"] == 0 and event["pass_rate"] == pytest.approx(1 / 3)


def test_validation_tries_a_lost_completion_again_and_leaves_out_the_second_loss(tmp_path):
    settings = at_k(0, tmp_path, steps=2, validation={"seed": 5})
    finish(settings, lost={(5, 0, 0): 1, (5, 1, 1): 2})
    first = read_jsonl(tmp_path / "r/validation.jsonl")[0]
    # each of four prompts has one right and one wrong completion; the wrong one of prompt 1 is missing
    assert first["lost_completions"] == 1 and first["pass_rate"] == pytest.approx((0.5 * 3 + 1) / 4)
    assert first["entropy"] == pytest.approx(0.5), "forced tokens do not count"


def test_a_prompt_without_any_validation_completion_ends_the_run(tmp_path):
    settings = recipe(tmp_path, steps=2, validation={"seed": 5})
    with pytest.raises(RuntimeError, match=r"validation of version .*prompt p41: all 2 "):
        attempt(settings, lost={(5, 1, 0): 2, (5, 1, 1): 2})


def test_files_with_completions_are_private(tmp_path):
    attempt(recipe(tmp_path, steps=1))
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "r").rglob("*")}
    assert modes["segment-00000.bin"] == modes["journal.jsonl"] == 0o600


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "validation.jsonl"])
@pytest.mark.parametrize("left", [None, 1])
def test_a_record_that_is_gone_or_cut_is_not_taken_for_a_new_run(tmp_path, name, left):
    """The axis of the curve would begin again at 0."""
    settings = at_k(0, tmp_path)
    attempt(settings, kill_at_s=50)
    file = tmp_path / "r" / name
    lines = file.read_text().splitlines(keepends=True)
    file.unlink() if left is None else file.write_text("".join(lines[:left]))
    with pytest.raises(RuntimeError, match=rf"{name}: has \d+ rows, and had \d+ when .* was saved; .* restore"):
        attempt(settings)
    file.write_text("".join(lines))
    finish(settings)


def replaced(path):
    path.with_name("new").write_text("")
    path.with_name("new").rename(path)


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "validation.jsonl", "validation_by_prompt.jsonl",
                                  "journal.jsonl", "rollouts/segment-00000.bin"])  # fmt: skip
@pytest.mark.parametrize(
    "damage, said",
    [
        (Path.unlink, "the file was removed or replaced while the run wrote to it. The written rows are in"),
        (replaced, "the file was removed or replaced while the run wrote to it. The written rows are in"),
        (lambda path: os.truncate(path, 1), "the file was shortened while the run wrote to it, to less than "),
    ],
    ids=["removed", "replaced", "shortened"],
)
def test_a_record_that_is_lost_under_a_running_run_ends_it_before_its_checkpoint(tmp_path, name, damage, said):
    """The validation of step 0 is over then, and no checkpoint begun."""
    settings, record = recipe(tmp_path), tmp_path / "r" / name
    with pytest.raises(OSError, match=f"{record}: {said}"):
        attempt(settings, changes=[(17.0, lambda _: damage(record))])
    assert not committed(tmp_path / "r/checkpoints")
    if "removed" in said:
        record.with_name(f"{record.name}.kept").rename(record)
        finish(settings)


def test_a_ledger_that_is_lost_before_the_first_checkpoint_is_missed(tmp_path):
    settings = recipe(tmp_path)
    attempt(settings, kill_at_s=17)
    assert not committed(tmp_path / "r/checkpoints") and read_history(tmp_path / "r").batches
    (tmp_path / "r/ledger.jsonl").unlink()
    with pytest.raises(RuntimeError, match=r"ledger.jsonl: has charges of 0 batches, and the journal \d batches"):
        attempt(settings)

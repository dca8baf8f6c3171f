"""The schedule ppo_off_policy with the real controller in virtual time: order, versions, kills at any moment.

`fakes.run` asserts that nothing is sent beside a weight update or a checkpoint, and one batch at a time.
"""

import pytest
from fakes.engine import StandInEngine
from fakes.run import PUBLISH_S, START_S, VALIDATE_S, attempt, recipe
from fakes.trainer import SAVE_S, TRAIN_S
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.rollouts.history import read_groups, read_history

PHASE = 3


def phases(folder, *, updates=PHASE, **changes):
    """A run whose phases have `updates` batches of two groups."""
    rollouts = {"schedule": "ppo_off_policy", "updates_per_phase": updates, "max_staleness_steps": 8}
    return recipe(folder, **{**changes, "rollouts": rollouts | changes.get("rollouts", {})})


def check(folder, batches, updates=PHASE):
    """The split of every phase, its one version, the age of its batches; returns the staleness of each batch."""
    history = read_history(folder)
    assert [b.batch for b in history.batches] == list(range(batches))
    assert [g for b in history.batches for g in b.group_ids] == list(range(2 * batches)), "in the order of admission"
    groups = read_groups(folder, history, history.finished)
    ages = []
    for batch in history.batches:
        start = history.batches[batch.batch - batch.batch % updates].policy_version
        versions = {
            v for g in batch.group_ids for c in groups[g].completions for v in (c.first_version, c.last_version)
        }
        assert versions == {start}
        ages.append(batch.policy_version - start)
    return ages


def test_generation_and_training_alternate_and_a_batch_is_as_old_as_its_place_in_the_phase(tmp_path):
    outcome = attempt(phases(tmp_path, steps=7), send_s=0.5)
    assert outcome.reason == "all 7 steps are made"
    assert check(tmp_path / "r", 7) == [0, 1, 2, 0, 1, 2, 0]
    rows = read_jsonl(tmp_path / "r/metrics.jsonl")
    assert [r["staleness_max"] for r in rows] == [r["staleness_mean"] for r in rows] == [0, 1, 2, 0, 1, 2, 0]
    assert [r["publish_seconds"] for r in rows] == [0, 0, PUBLISH_S, 0, 0, PUBLISH_S, 0]
    assert outcome.sent_ahead == [2, 3, 5, 6], "none across the end of a phase; the run ends with step 7"
    events = [(e["event"], e.get("group_id", e.get("batch"))) for e in read_jsonl(tmp_path / "r/journal.jsonl")]
    finished = [group for name, group in events[:12] if name == "finish"]
    assert finished != sorted(finished), "groups finish in another order than they are trained on"
    for phase in range(3):
        names = [name for name, _ in events[15 * phase : 15 * phase + 12]]
        assert names.count("admit") == names.count("finish") == 6, (
            "the whole phase is generated before it is trained on"
        )
        assert events[15 * phase + 12 : 15 * phase + 15] == [
            ("batch", 3 * phase + i) for i in range(3 if phase < 2 else 1)
        ]


def test_a_validation_that_is_due_within_a_phase_is_made_at_its_end_of_the_version_there(tmp_path):
    """Every second step, phases of three: due at 2, 4, 6 and 8; the engines get the versions 3, 6 and, last, 8."""
    attempt(phases(tmp_path, steps=8))
    rows = read_jsonl(tmp_path / "r/validation.jsonl")
    assert [(r["step"], r["policy_version"]) for r in rows] == [(0, 0), (3, 3), (6, 6), (8, 8)]
    steps = {r["step"]: r for r in read_jsonl(tmp_path / "r/metrics.jsonl")}
    assert all(r["pinned_seconds"] == 0 for r in steps.values()), "no weight update waits for one"
    ledger = [r for r in read_jsonl(tmp_path / "r/ledger.jsonl") if r.get("role") == "validation"]
    assert {r["phase"] for r in ledger} == {"validate"}, "nothing else is charged in the time of a validation"
    between = [3600 * r["hours"] for r in ledger if r["step"] in (3, 6)]
    # of two engine devices and the trainer, but for the checkpoint that it writes beside
    assert between == pytest.approx([3 * VALIDATE_S - SAVE_S] * 2, abs=1e-2)


def test_engines_that_idle_while_a_phase_is_trained_on_are_charged_as_engines(tmp_path):
    attempt(phases(tmp_path, steps=6, validation={"every_steps": 0}))
    rows = [r for r in read_jsonl(tmp_path / "r/ledger.jsonl") if r.get("phase") == "train"]
    charged = {role: sum(3600 * r["hours"] for r in rows if r["role"] == role) for role in ("engine", "trainer")}
    train_s = 6 * TRAIN_S + 2 * PUBLISH_S
    assert charged == pytest.approx({"engine": 2 * train_s, "trainer": train_s}, abs=1e-3)


def test_a_phase_of_one_batch_is_the_synchronous_pipeline(tmp_path):
    attempt(phases(tmp_path / "a", updates=1, rollouts={"max_staleness_steps": 0}))
    attempt(recipe(tmp_path / "b", rollouts={"max_staleness_steps": 0}))
    one, other = (read_history(tmp_path / name / "r") for name in "ab")
    assert one.batches == other.batches
    assert one.events == other.events[: len(one.events)], "at its end the pipeline draws two more groups"
    validations = [[r["step"] for r in read_jsonl(tmp_path / n / "r/validation.jsonl")] for n in "ab"]
    assert validations[0] == validations[1] == [0, 2, 4, 6]


def test_a_batch_without_a_step_is_one_of_the_phase(tmp_path):
    """Groups 2, 3 and 10, 11 have no variance: the middle of the first phase and the end of the second."""
    outcome = attempt(phases(tmp_path, steps=5), flat_groups={2, 3, 10, 11})
    assert outcome.reason == "all 5 steps are made"
    rows = read_jsonl(tmp_path / "r/metrics.jsonl")
    found = [(r["batches"], r["step"], "skipped" in r, r["staleness_max"], r.get("publish_seconds", 0)) for r in rows]
    assert found == [
        (1, 1, False, 0, 0),
        (2, 1, True, 1, 0),
        (3, 2, False, 1, PUBLISH_S),
        (4, 3, False, 0, 0),
        (5, 4, False, 1, 0),
        (6, 4, True, 2, PUBLISH_S),
        (7, 5, False, 0, 0),
    ]
    assert check(tmp_path / "r", 7) == [0, 1, 1, 0, 1, 2, 0]
    assert [r["step"] for r in read_jsonl(tmp_path / "r/validation.jsonl")] == [0, 2, 4, 5]


def test_the_last_phase_has_the_prompts_that_are_left(tmp_path):
    """40 prompts: six phases of six groups, and one of four."""
    outcome = attempt(phases(tmp_path, steps=99, curriculum={"max_epochs": 1, "no_positive_resampling": None}))
    assert outcome.reason == "curriculum.max_epochs 1 reached"
    assert check(tmp_path / "r", 20) == [0, 1, 2] * 6 + [0, 1]
    assert read_jsonl(tmp_path / "r/validation.jsonl")[-1]["policy_version"] == 20


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_run_that_ended_within_a_phase_goes_on_with_the_rest_of_it(tmp_path, steps):
    attempt(phases(tmp_path, steps=steps))
    second = attempt(phases(tmp_path, steps=8))
    assert second.trained == list(range(steps + 1, 9))
    assert check(tmp_path / "r", 8) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("at_s", [START_S + 1.5 * n for n in range(20)])
def test_a_run_that_is_asked_to_save_and_exit_repeats_no_step(tmp_path, at_s):
    made = phases(tmp_path, steps=6)
    first = attempt(made, save_at_s=at_s)
    assert first.seconds < at_s + TRAIN_S + VALIDATE_S + PUBLISH_S + SAVE_S
    second = attempt(made)
    assert [*first.trained, *second.trained] == list(range(1, 7))
    assert check(tmp_path / "r", 6) == [0, 1, 2, 0, 1, 2]
    assert [r["step"] for r in read_jsonl(tmp_path / "r/validation.jsonl")] == [0, 3, 6]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    updates=st.sampled_from([1, 2, 3, 8]),
    seed=st.integers(0, 1000),
    send_s=st.sampled_from([0.0, 0.7, TRAIN_S + 1]),
    flat=st.sets(st.integers(0, 11), max_size=4),
    kills=st.lists(st.floats(0.1, 60.0), min_size=1, max_size=3),
    power_loss=st.booleans(),
)
@example(updates=1, seed=0, send_s=0.0, flat=set(), kills=[27.0, 1.0], power_loss=False)
@example(updates=3, seed=0, send_s=0.0, flat=set(), kills=[20.0], power_loss=False)  # two batches of three are out
def test_a_kill_at_any_moment_changes_no_batch(tmp_path_factory, updates, seed, send_s, flat, kills, power_loss):
    """In generation, in any step of a phase, in an update: the rest of the phase is trained on, nothing twice."""
    folder = tmp_path_factory.mktemp("run")
    flat = set(flat) | {g + 1 for g in flat if g % 2 == 0}
    made = phases(folder, updates=updates, seed=seed, checkpoint={"every_steps": 2})
    whole = attempt(made.model_copy(update={"name": "whole"}), flat_groups=flat, send_s=send_s)
    outcomes = [attempt(made, kill_at_s=kills[0], power_loss=power_loss, flat_groups=flat, send_s=send_s)]
    outcomes += [attempt(made, kill_at_s=at, flat_groups=flat, send_s=send_s) for at in kills[1:]]
    outcomes.append(attempt(made, flat_groups=flat, send_s=send_s))
    assert whole.reason == outcomes[-1].reason == "all 6 steps are made"
    found, expected = (read_history(folder / name) for name in ("r", "whole"))
    assert found.batches == expected.batches
    assert check(folder / "r", len(found.batches), updates) == check(folder / "whole", len(found.batches), updates)
    sent = {step: each for outcome in outcomes for step, each in outcome.completions.items()}
    assert sent == whole.completions
    rows, wanted = (read_jsonl(folder / name / "metrics.jsonl") for name in ("r", "whole"))
    assert [(r["batches"], r["step"], r["staleness_max"]) for r in rows] == [
        (r["batches"], r["step"], r["staleness_max"]) for r in wanted
    ]
    validations = [[r["step"] for r in read_jsonl(folder / n / "validation.jsonl")] for n in ("r", "whole")]
    assert validations[0] == validations[1]


def test_an_engine_that_is_lost_while_a_phase_is_trained_on_gets_the_weights_at_its_end(tmp_path):
    """It joins again within the phase: an update of it alone, which the stand-in has not, would be at a version that
    the others do not hold."""

    def lose(engines):
        engines.evict(engines.serving[0], "engine-0: gone")

    def join(engines):
        engines.join(0, StandInEngine())

    made = phases(tmp_path, steps=6, validation={"every_steps": 0})
    outcome = attempt(made, changes=[(13.6, lose), (14.1, join)])  # both in the first step
    assert outcome.reason == "all 6 steps are made" and outcome.trained == [1, 2, 3, 4, 5, 6]
    assert check(tmp_path / "r", 6) == [0, 1, 2, 0, 1, 2]
    serving = [r["engines_serving"] for r in read_jsonl(tmp_path / "r/metrics.jsonl")]
    assert serving == [0, 0, 1, 1, 1, 1]

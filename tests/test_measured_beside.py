"""Validations and evaluations beside the training, in virtual time: nothing waits, versions hold, kills at any time.

`fakes.run` is a whole controller with a stand-in trainer and stand-in engines.
"""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from evaluation_files import AIME_2024, MATH_500, read_result, written
from fakes.clock import StandInClock
from fakes.engine import StandInEngine
from fakes.run import VALIDATE_S, attempt, recipe
from fakes.trainer import TRAIN_S
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_scalerl.checkpoints.jsonl import read_jsonl
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.measure import HeldEngine
from megatron_scalerl.controller.meter import Meter
from megatron_scalerl.controller.run_folder import ResumePoint
from megatron_scalerl.engine.membership import EngineState, Membership
from megatron_scalerl.evaluation.contamination import contamination
from megatron_scalerl.evaluation.inputs import EvaluationInputs
from megatron_scalerl.evaluation.problems import read_problems
from megatron_scalerl.evaluation.results import COMPLETIONS, SUMMARY, Header, ResultFile, ResultInUse
from megatron_scalerl.launch.placement import Devices
from megatron_scalerl.types import Prompt

STEPS = 9


class Tokenizer:
    def decode(self, token_ids, **settings):
        return " ".join(map(str, token_ids))


def inputs(folder):
    files = [
        read_problems(written(folder, "aime.jsonl", AIME_2024)),
        read_problems(written(folder, "m.jsonl", MATH_500)),
    ]
    return EvaluationInputs(
        recipe=recipe(folder),
        tokenizer=Tokenizer(),
        files=tuple(files),
        prompts={
            file.name: [
                Prompt(prompt_id=p.problem_id, text=p.text, answer=p.answer, token_ids=(1,)) for p in file.problems
            ]
            for file in files
        },
        contaminations={file.name: contamination([], []) for file in files},
    )


def beside(folder, *, engines=2, **changes):
    evaluation = {"every_steps": 3, "files": ["aime.jsonl", "m.jsonl"], "generations": 4}
    return recipe(
        folder,
        steps=STEPS,
        engine={"count": engines},
        **{"evaluation": evaluation, "rollouts": {"max_staleness_steps": 8}} | changes,
    )


def running(folder, **changes):
    """Makes an attempt at a run that is evaluated."""
    return partial(attempt, beside(folder, **changes), evaluation=inputs(folder))


def rows(folder, name):
    return read_jsonl(folder / f"r/{name}.jsonl")


def check_evaluations(folder):
    """Each is complete, of the version of its step, and recorded once; a step is recorded or its loss is."""
    found = [row for row in rows(folder, "evaluation") if "lost" not in row]
    steps = [(row["step"], row["file"]) for row in found]
    assert len(set(steps)) == len(steps), "none twice"
    for row in found:
        path = folder / f"r/evaluations/step-{row['step']:06d}"
        header, completions = read_result(path)
        assert header.version == row["policy_version"] == row["step"]
        assert header.digest == row["weight_digest"] == f"weights-{row['step']}"
        assert {c.versions for c in completions} == {(row["step"],) * 2}
        assert len(completions) == len({c.key for c in completions}) == 16
        assert json.loads((path / SUMMARY).read_text())["evaluation"]["versions_found"] == [row["step"]]
    return sorted({row["step"] for row in found})


def test_nothing_waits_for_a_validation_or_an_evaluation(tmp_path):
    running(tmp_path, validation={"every_steps": 3})()
    assert check_evaluations(tmp_path) == [0, 3, 6, 9]
    assert [row["step"] for row in rows(tmp_path, "validation")] == [0, 3, 6, 9]
    assert {row["pinned_seconds"] for row in rows(tmp_path, "metrics")} == {0.0}


def test_one_that_is_due_while_the_second_engine_is_busy_is_made_of_the_next_version(tmp_path):
    running(tmp_path, validation={"every_steps": 2})()
    assert check_evaluations(tmp_path) == [0, 4, 6, 9]
    assert {row["pinned_seconds"] for row in rows(tmp_path, "metrics")} == {0.0}


def test_with_one_engine_the_next_update_waits_as_before(tmp_path):
    attempt(recipe(tmp_path, steps=4, rollouts={"max_staleness_steps": 8}))
    waited = [row["pinned_seconds"] for row in rows(tmp_path, "metrics")]
    assert waited == [pytest.approx(VALIDATE_S - TRAIN_S) if step in (3,) else 0.0 for step in (1, 2, 3, 4)]


def test_all_engines_generate_where_the_recipe_says_so(tmp_path):
    on_all = {"engine": {"count": 2}, "validation": {"engine": "all"}, "rollouts": {"max_staleness_steps": 8}}
    attempt(recipe(tmp_path, steps=4, **on_all))
    assert max(row["pinned_seconds"] for row in rows(tmp_path, "metrics")) == pytest.approx(VALIDATE_S - TRAIN_S)


def test_the_held_engine_is_charged_apart_from_the_axis(tmp_path):
    running(tmp_path)()
    hours = {}
    for row in rows(tmp_path, "ledger"):
        if "role" in row:
            hours[row["role"]] = hours.get(row["role"], 0.0) + row["hours"]
    assert hours["evaluation"] > 0 and hours["validation"] > 0
    on_axis = [row for row in rows(tmp_path, "ledger") if row.get("role") in ("engine", "trainer") and row["hours"]]
    assert {row["batch"] for row in on_axis} == set(range(1, STEPS + 1))
    training = sum(row["hours"] for row in on_axis if row["role"] == "trainer" and row["phase"] != "validate")
    assert training == pytest.approx(sum(r["step_seconds"] for r in rows(tmp_path, "metrics")) / 3600)


def test_an_evicted_engine_ends_an_evaluation_and_a_later_version_is_evaluated(tmp_path):
    def evict(engines):
        if engines.held:
            engines.evict(engines.held[0], "it was killed")

    outcome = running(tmp_path, engines=3)(changes=[(7.0 + 0.25 * i, evict) for i in range(1, 3)])
    assert outcome.reason == f"all {STEPS} steps are made"
    lost = [row for row in rows(tmp_path, "evaluation") if "lost" in row]
    assert [row["step"] for row in lost] == [0] and "was evicted" in lost[0]["lost"]
    done = check_evaluations(tmp_path)
    assert done and done[0] in (1, 2, 3) and done[-1] == STEPS


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    kills=st.lists(st.floats(0.1, 40.0), min_size=1, max_size=3),
    engines=st.integers(2, 3),
    every=st.integers(1, 4),
    checkpoint=st.integers(1, 4),
    power_loss=st.booleans(),
)
@example(kills=[19.0, 12.0], engines=2, every=3, checkpoint=1, power_loss=False)
@example(kills=[17.0, 1.0], engines=2, every=1, checkpoint=1, power_loss=True)
def test_a_kill_at_any_moment_neither_loses_nor_repeats_silently(
    tmp_path_factory, kills, engines, every, checkpoint, power_loss
):
    folder = tmp_path_factory.mktemp("run")
    evaluation = {"every_steps": every, "files": ["aime.jsonl", "m.jsonl"], "generations": 4}
    run = running(folder, engines=engines, evaluation=evaluation, checkpoint={"every_steps": checkpoint})
    axis = 0.0
    for at in [*kills, None]:
        outcome = run(kill_at_s=at, power_loss=power_loss and at is not None)
        charged = [row for row in rows(folder, "ledger") if row.get("role") in ("trainer", "engine")]
        now = sum(row["hours"] for row in charged)
        assert power_loss or now >= axis - 1e-9, "a crash takes nothing off the compute axis"
        axis = now
        if outcome.reason is not None:
            break
    assert outcome.reason == f"all {STEPS} steps are made"
    assert [row["step"] for row in rows(folder, "metrics")] == list(range(1, STEPS + 1))
    check_evaluations(folder)
    said = {row["step"] for row in rows(folder, "evaluation")}
    begun = {int(p.name.split("-")[1].split(".")[0]) for p in (folder / "r/evaluations").glob("step-*")}
    assert begun == said, "each that was begun is recorded, or its loss is"
    for first in range(0, STEPS + 1, every):
        assert any(first <= step < first + every + 3 for step in said) or first + every + 3 > STEPS


def test_a_problem_without_a_completion_ends_the_evaluation_and_not_the_run(tmp_path):
    run = running(tmp_path, validation={"every_steps": 0})
    outcome = run(lost={(1, 1, index): 4 for index in range(4)})
    assert outcome.reason == f"all {STEPS} steps are made"
    first, *others = rows(tmp_path, "evaluation")
    assert first == {"step": 0, "lost": "aime: problem 1: all of its completions are lost"}
    assert check_evaluations(tmp_path)[0] in (1, 2) and all("lost" not in row for row in others)


def test_a_damaged_evaluation_begins_anew_and_keeps_what_was_there(tmp_path):
    run = running(tmp_path)
    run(kill_at_s=9.0)
    evaluated = tmp_path / "r/evaluations/step-000000"
    with (evaluated / COMPLETIONS).open("ab") as file:
        file.write(b'{"key": 5}\n')
    damaged = (evaluated / COMPLETIONS).read_bytes()
    run()
    assert 0 in check_evaluations(tmp_path)
    assert (evaluated.with_name("step-000000.1") / COMPLETIONS).read_bytes() == damaged


def test_an_evaluation_that_another_process_writes_stays_where_it_is(tmp_path):
    run = running(tmp_path)
    run(kill_at_s=1.0)
    folder = tmp_path / "r/evaluations/step-000000"
    other = Header(policy="p", digest="d", version=0, files=(), seed=0, settings={})
    with ResultFile(folder, other), pytest.raises(ResultInUse, match="step-000000: another evaluation"):
        run()
    assert [path.name for path in folder.parent.glob("step-000000*")] == ["step-000000"]
    run()
    assert {0, 9} <= set(check_evaluations(tmp_path)) and folder.with_name("step-000000.1").is_dir()


def test_rows_that_a_power_loss_tore_off_come_from_the_summary(tmp_path):
    run = running(tmp_path)
    run(kill_at_s=30.0)
    path = tmp_path / "r/evaluation.jsonl"
    before = path.read_bytes()
    assert before.count(b"\n") == 4, "two evaluations of two files"
    path.write_bytes(before[: before.rindex(b'{"step"') + 40])
    (tmp_path / "r/evaluations/step-000000-copy").mkdir()
    run()
    assert path.read_bytes().startswith(before)
    check_evaluations(tmp_path)


def test_the_last_version_is_evaluated_where_every_engine_has_to_get_it_again_first(tmp_path):
    """At the end one engine has just been evicted, and the other one is held at the version before the last."""

    def evict(engines):
        if engines.held and engines.serving:
            engines.evict(engines.serving[0], "it was killed")

    def start(engines):
        for number, member in enumerate(engines.members):
            if member.state is EngineState.DRAINING:
                engines.start(number)
                engines.join(number, StandInEngine(f"engine-{number}"))

    evaluation = {"every_steps": 3, "files": ["aime.jsonl", "m.jsonl"], "generations": 10}
    rollouts = {"max_staleness_steps": 8, "max_in_flight": 4}
    run = running(tmp_path, evaluation=evaluation, validation={"every_steps": 0}, rollouts=rollouts)
    run(changes=[(56.0, evict), (57.0, start), (90.0, evict), (91.0, start)])
    assert [row["step"] for row in rows(tmp_path, "metrics")][-1] == STEPS
    assert [row["step"] for row in rows(tmp_path, "evaluation")][-2:] == [STEPS, STEPS]


def test_an_engine_is_shared_by_the_measurements_of_one_version():
    engines = Membership.of([StandInEngine("engine-0"), StandInEngine("engine-1")], version=4)

    said = []
    meter = SimpleNamespace(hold=lambda *_: said.append("held"), release=lambda _: said.append("released"))
    held = HeldEngine(engines, meter)
    engine = held.hold(4, "validation")
    assert held.hold(4, "evaluation") is engine and held.hold(5, "validation") is None, "the other one has to serve"
    assert engines.held == [engine] and len(engines.serving) == 1 and engine not in engines.alive
    held.release(engine)
    assert engines.held == [engine]
    held.release(engine)
    assert engines.stale == [engine] and said == ["held", "released"]
    assert held.hold(5, "evaluation") is None and held.hold(5, "evaluation", least_serving=1) is not None


def test_the_time_of_a_held_engine_goes_to_what_it_finished(tmp_path):
    clock, engine = StandInClock(), StandInEngine()
    ledger = Ledger(tmp_path / "ledger.jsonl", "gpu_hours", incarnation="a")
    meter = Meter(ledger, Devices(unit="gpu_hours", trainer=1, engine=4), ResumePoint(), clock=clock)
    clock.now = 1800.0
    meter.hold(engine, 2, "evaluation")  # for half of the window
    clock.now = 3600.0
    meter.charge_produce(0)
    assert ledger.hours("evaluation") == pytest.approx(1.0), "it finished nothing yet"
    assert ledger.hours("engine") == pytest.approx(3.0)
    engine.received_tokens = 100
    meter.count_measured("evaluation", 25, engine)
    meter.count_measured("validation", 25, engine)
    meter.count_training(150)  # 50 of them on the held engine
    clock.now = 7200.0
    meter.release(engine)
    meter.charge_train(0, 1)
    assert ledger.hours("evaluation") == pytest.approx(1.0 + 0.5)
    assert ledger.hours("validation") == pytest.approx(0.5)
    assert ledger.hours("engine") == pytest.approx(3.0 + 3.0) and ledger.hours("trainer") == pytest.approx(2.0)
    assert ledger.hours() == pytest.approx(10.0)

"""The curriculum: every prompt once per epoch, solved ones never again, the same after a replay."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_scalerl.prompts.curriculum import Curriculum, CurriculumDry
from megatron_scalerl.types import Prompt


def prompts(count):
    return [Prompt(prompt_id=f"id{index}", text=f"text{index}", answer="1", token_ids=(1,)) for index in range(count)]


def draw_ids(curriculum, count):
    return [curriculum.draw()[0].prompt_id for _ in range(count)]


def test_every_epoch_is_a_different_shuffle_of_all_prompts():
    curriculum = Curriculum(prompts(50), 1, None)
    draws = [curriculum.draw() for _ in range(150)]
    assert [epoch for _, epoch in draws] == [0] * 50 + [1] * 50 + [2] * 50
    epochs = [[prompt.prompt_id for prompt, _ in draws[start : start + 50]] for start in (0, 50, 100)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_prompts_seed_and_epoch_alone():
    first = draw_ids(Curriculum(prompts(50), 1, 0.9), 50)
    assert draw_ids(Curriculum(prompts(50)[::-1], 1, 0.9), 50) == first
    assert draw_ids(Curriculum(prompts(50), 2, 0.9), 50) != first
    scored = Curriculum(prompts(50), 1, 0.9)
    scored.observe(first[0], 0.5)
    draws = draw_ids(scored, 100)
    assert draws == draw_ids(Curriculum(prompts(50), 1, 0.9), 100)


def test_at_the_threshold_a_prompt_is_removed_and_below_it_is_not():
    curriculum = Curriculum(prompts(2), 1, 0.9)
    draw_ids(curriculum, 2)
    curriculum.observe("id0", 0.9)
    curriculum.observe("id1", 14 / 16)
    assert draw_ids(curriculum, 5) == ["id1"] * 5
    assert curriculum.removed == 1


def test_without_a_threshold_solved_prompts_are_drawn_again():
    curriculum = Curriculum(prompts(2), 1, None)
    for identity in draw_ids(curriculum, 2):
        curriculum.observe(identity, 1.0)
    assert sorted(draw_ids(curriculum, 2)) == ["id0", "id1"]


def test_the_latest_scored_group_decides_and_removal_is_permanent():
    curriculum = Curriculum(prompts(2), 1, 0.9)
    draw_ids(curriculum, 2)
    curriculum.observe("id0", 1.0)
    curriculum.observe("id0", 0.5)  # scored later, before the next draw of id0
    assert sorted(draw_ids(curriculum, 2)) == ["id0", "id1"]
    curriculum.observe("id0", 1.0)
    assert draw_ids(curriculum, 3) == ["id1"] * 3
    curriculum.observe("id0", 0.0)  # a straggler after the removal
    assert draw_ids(curriculum, 3) == ["id1"] * 3


def test_a_dry_curriculum_gives_the_reason_and_stays_dry():
    curriculum = Curriculum(prompts(3), 1, 0.9)
    for identity in draw_ids(curriculum, 3):
        curriculum.observe(identity, 1.0)
    for _ in range(2):
        with pytest.raises(CurriculumDry, match=r"all 3 prompts reached pass rate 0\.9"):
            curriculum.draw()
    limited = Curriculum(prompts(3), 1, 0.9, max_epochs=2)
    draw_ids(limited, 6)
    for _ in range(2):
        with pytest.raises(CurriculumDry, match=r"curriculum\.max_epochs 2 reached"):
            limited.draw()


def curriculum_of(count, threshold, mixed):
    """Of one task, or of two of which the second has the weight 3."""
    if not mixed or count == 1:
        return Curriculum(prompts(count), 1, threshold)
    tasks = [replace(prompt, task="ab"[number % 2]) for number, prompt in enumerate(prompts(count))]
    return Curriculum(tasks, 1, threshold, None, {"a": 1.0, "b": 3.0})


def run_events(count, threshold, mixed, events, restart_before):
    """Outcomes of draws ("dry" included) and scores in the given order, with a restart before some of them.

    An event is None for a draw, or (which, pass rate) that scores the which-th youngest drawn prompt. A restart
    replays draws and scores on a new curriculum, as a run does from its journal.
    """
    curriculum = curriculum_of(count, threshold, mixed)
    outcomes, scores, drawn = [], {}, []
    for number, event in enumerate(events):
        if number in restart_before:
            curriculum = curriculum_of(count, threshold, mixed)
            for past in range(number):
                if past in scores:
                    curriculum.observe(*scores[past])
                elif events[past] is None:
                    draw(curriculum)
        if event is None:
            outcomes.append(draw(curriculum))
            drawn += [outcomes[-1][0]] if outcomes[-1] != "dry" else []
        elif drawn:
            scores[number] = (drawn[-1 - event[0] % len(drawn)], event[1])
            curriculum.observe(*scores[number])
    return outcomes, curriculum.removed, curriculum.epoch


def draw(curriculum):
    """(prompt id, epoch), or "dry"."""
    try:
        prompt, epoch = curriculum.draw()
    except CurriculumDry:
        return "dry"
    return prompt.prompt_id, epoch


EVENTS = st.lists(
    st.one_of(st.none(), st.tuples(st.integers(0, 8), st.sampled_from([0.0, 0.5, 0.875, 0.9375, 1.0]))),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 6),
    threshold=st.sampled_from([0.9, None]),
    mixed=st.booleans(),
    events=EVENTS,
    restart_before=st.sets(st.integers(0, 59)),
)
def test_a_replay_of_draws_and_scores_restores_the_curriculum(count, threshold, mixed, events, restart_before):
    whole = run_events(count, threshold, mixed, events, set())
    assert run_events(count, threshold, mixed, events, restart_before) == whole


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 6), events=EVENTS)
def test_no_draw_returns_a_prompt_whose_latest_group_was_solved(count, events):
    """Every draw agrees with a one-line model, and no prompt is drawn twice in an epoch."""
    curriculum = Curriculum(prompts(count), 1, 0.9)
    latest, drawn = {}, []
    for event in events:
        if event is None:
            outcome = draw(curriculum)
            if outcome == "dry":
                continue
            assert latest.get(outcome[0], 0.0) < 0.9
            assert outcome not in drawn
            drawn.append(outcome)
        elif drawn:
            identity = drawn[-1 - event[0] % len(drawn)][0]
            latest[identity] = event[1]
            curriculum.observe(identity, event[1])


def test_skipped_counts_every_turn_of_a_removed_prompt():
    curriculum = Curriculum(prompts(10), 1, 0.9)
    for prompt_id in draw_ids(curriculum, 10)[:4]:
        curriculum.observe(prompt_id, 1.0)
    assert curriculum.skipped == 0
    draw_ids(curriculum, 6 + 6 + 1)  # the rest of two epochs, and into a third
    assert curriculum.removed == 4
    assert 8 <= curriculum.skipped <= 12, "all four in each whole epoch, though they are removed once"

"""The tiny task: arithmetic from left to right, traces that stop early, a split without overlap."""

import random
from collections import Counter

import pytest

from megatron_scalerl.recipe.sections import PAPER_PHRASE
from megatron_scalerl.tiny import task


def evaluate(text):
    """Intermediate values of a problem, computed from its text alone."""
    first, *steps = text.rstrip("=").split(";")
    values = [int(first)]
    for step in steps:
        values.append(task.apply(values[-1], step[0], int(step[1:])))
    return values


@pytest.mark.parametrize("level", task.LEVELS)
def test_every_intermediate_value_is_one_digit(level):
    rng = random.Random(level)
    for _ in range(300):
        problem = task.draw_problem(rng, level)
        values = evaluate(problem.text)
        assert all(0 <= value <= 9 for value in values)
        assert len(values) == level + 1
        assert values[-1] == problem.answer
        assert len(problem.text) == 3 * level + 2


def test_operators_have_weights_two_two_one():
    """From 1..4 all three operators stay in range: 2/5, 2/5 and 1/5 of the draws."""
    rng = random.Random(0)
    first = Counter()
    for _ in range(20000):
        problem = task.draw_problem(rng, 1)
        if 1 <= problem.start <= 4:
            first[problem.operations[0][0]] += 1
    total = sum(first.values())
    assert [round(first[operator] / total, 1) for operator in "+-*"] == [0.4, 0.4, 0.2]


def test_a_full_trace_has_6n_minus_1_characters_and_ends_at_the_answer():
    rng = random.Random(5)
    problem = task.draw_problem(rng, 8)
    thinking, value = task.thinking_trace(rng, problem, 0.0)
    assert len(thinking) == 47
    assert value == problem.answer
    assert [int(step[-1]) for step in thinking.split(";")] == evaluate(problem.text)[1:]


def test_warm_start_traces_stop_early_and_answer_with_the_value_reached():
    rows = list(task.warm_start_rows(1, 4000))
    plain = [row for row in rows if PAPER_PHRASE not in row["completion"]]
    complete = Counter()
    seen = Counter()
    for row in plain:
        thinking, answer = row["completion"].removesuffix("<eos>").split("</think>")
        steps = thinking.split(";") if thinking else []
        values = evaluate(row["prompt"])
        assert [int(step[-1]) for step in steps] == values[1 : 1 + len(steps)]
        assert int(answer) == values[len(steps)]
        seen[row["level"]] += 1
        complete[row["level"]] += len(steps) == row["level"]
    # The share of complete traces of level n is 0.8^n; 500 rows a level have a standard error of about .02.
    for level in (1, 2, 4, 8):
        assert complete[level] / seen[level] == pytest.approx(0.8**level, abs=0.08)


def test_interrupted_examples_contain_the_phrase_once_and_the_last_finished_result():
    rows = list(task.warm_start_rows(1, 4000))
    cut = [row for row in rows if PAPER_PHRASE in row["completion"]]
    # 5 % of the traces that are longer than eight characters, about 60 % of all.
    assert 0.02 < len(cut) / len(rows) < 0.05
    for row in cut:
        thinking, rest = row["completion"].split(PAPER_PHRASE)
        assert len(thinking) >= 8
        finished = [step for step in thinking.split(";") if len(step) == 5]
        assert rest == f"</think>{finished[-1][-1]}<eos>"


def test_training_and_held_out_prompts_are_disjoint():
    training = list(task.prompt_rows(1, 4000, held_out=False))
    held_out = list(task.prompt_rows(1, 200, held_out=True))
    warm_start = {row["prompt"] for row in task.warm_start_rows(1, 5000)}
    assert len({row["prompt"] for row in training}) == 4000
    assert len({row["prompt"] for row in held_out}) == 200
    assert not {row["prompt"] for row in held_out} & ({row["prompt"] for row in training} | warm_start)
    assert all(evaluate(row["prompt"])[-1] == int(row["answer"]) for row in training + held_out)


def test_levels_alternate_and_exhausted_levels_are_skipped():
    held_out = Counter(row["level"] for row in task.prompt_rows(1, 200, held_out=True))
    assert held_out[1] == 1, "of the 95 problems of level 1 one is held out"
    assert all(28 <= held_out[level] <= 29 for level in range(2, 9))

"""Where more thinking stops paying: known answers on synthetic policies, and honest ones where nothing is known."""

from types import SimpleNamespace

import numpy as np

from megatron_scalerl.evaluation.budgets import saturation
from megatron_scalerl.evaluation.problems import Problem, ProblemFile
from megatron_scalerl.evaluation.results import Cell, Key, Row
from megatron_scalerl.evaluation.summaries import compare_budgets, gains_table, scores_table, summarize

BUDGETS = (256, 1024, 4096, 16384)


def sweep(rates_by_budget, *, prompts, k):
    """[prompts, budgets] pass rates of a policy whose mean pass rate at each budget is given."""
    random = np.random.default_rng(0)
    difficulty = random.beta(0.5, 0.5, prompts)
    columns = [random.binomial(k, np.clip(difficulty * rate * 2, 0, 1)) / k for rate in rates_by_budget]
    return np.stack(columns, axis=1)


def test_a_plateau_is_found():
    found = saturation(BUDGETS, sweep((0.1, 0.3, 0.45, 0.45), prompts=600, k=32), margin=0.03)
    assert (found.stops_at, found.no_gain_shown_from) == (4096, 4096)
    assert "stops paying at a budget of 4,096 tokens" in found.line()
    assert [step.shown for step in found.steps] == [True, True, False, False]


def test_a_rise_to_the_end_is_not_a_plateau():
    found = saturation(BUDGETS, sweep((0.1, 0.2, 0.3, 0.45), prompts=600, k=16))
    assert (found.stops_at, found.no_gain_shown_from) == (None, 16384)
    assert found.line() == "more thinking pays up to the largest budget, 16,384 tokens"


def test_little_data_decides_nothing():
    found = saturation(BUDGETS, sweep((0.1, 0.3, 0.45, 0.45), prompts=30, k=4))
    assert found.stops_at is None and found.no_gain_shown_from < 16384
    assert found.line().startswith("not decided: ")


def made_cell(budget, correct, tokens):
    rows = tuple(
        tuple(
            Row(
                key=Key(file="f", number=n, index=i, budget=budget),
                problem_id=str(n),
                correct=i < c,
                tokens=tokens + i,
                interrupted=budget == 16,
            )
            for i in range(4)
        )
        for n, c in enumerate(correct, 1)
    )
    return Cell(file="f", budget=budget, rows=rows, lost=0)


def test_the_sweep_as_tables():
    given = {"problem_id": "", "text": "t", "answer": "1"}
    problems = tuple(
        Problem(number=n, where=f"f.jsonl: line {n}", labels={"level": str(n % 2)}, **given) for n in range(1, 41)
    )
    file = ProblemFile(path="f.jsonl", schema="math500", problems=problems)
    made = [made_cell(16, [0] * 40, 20), made_cell(64, [4, 2] * 20, 50), made_cell(256, [4, 2] * 20, 60)]
    summaries = [summarize(cell, file, SimpleNamespace(problems_hit={"f.jsonl: line 1"}), k=4) for cell in made]
    assert [s.mean_at_k.value for s in summaries] == [0, 0.75, 0.75]
    assert [s.mean_tokens for s in summaries] == [21.5, 51.5, 61.5]
    assert summaries[1].labels["level"]["1"].value == 1 and summaries[1].labels["level"]["0"].prompts == 20
    assert summaries[1].clean.prompts == 39 and summaries[0].interrupted_share == 1
    assert scores_table(summaries).rows[1][:3] == ("64", "40", "0.750")
    found = compare_budgets(made)
    assert found.stops_at == 64 and len(gains_table(found).rows) == 2
    assert compare_budgets(made[:1]) is None

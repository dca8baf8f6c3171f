"""The second judge: what it confirms, and that it changes no reward."""

import pytest
from answer_forms import NUMBERS, OPEN, RIGHT, SAYINGS
from recipe_files import small_recipe
from verifier_pools import prompt

from megatron_scalerl.recipe.tasks import AUDITS, tasks_of
from megatron_scalerl.rewards.audit import confirm_math
from megatron_scalerl.rewards.pool import TaskPools
from megatron_scalerl.types import Score


@pytest.mark.parametrize("reference, other", NUMBERS)
def test_a_number_that_is_left_to_compute_is_not_confirmed(reference, other):
    texts = [saying.format(form) for form in NUMBERS[reference, other] for saying in SAYINGS]
    assert [text for text in texts if confirm_math(text, reference, {})] == []


@pytest.mark.parametrize("reference", ["14", r"\frac{3}{2}", "-7", "0.75", r"2\sqrt{3}", "B"])
def test_a_plain_answer_is_confirmed(reference):
    texts = [f"The answer is {reference}.", f"so $\\boxed{{{reference}}}$", f"<answer>{reference}</answer>"]
    assert [text for text in texts if not confirm_math(text, reference, {})] == []
    assert not any(confirm_math(text, "15", {}) for text in texts)


def test_most_right_forms_are_confirmed():
    texts = [saying.format("14") for saying in RIGHT]
    assert sum(confirm_math(text, "14", {}) for text in texts) >= 0.9 * len(texts)
    texts = [saying.format(right="14", other="13") for saying in OPEN]
    assert sum(confirm_math(text, "14", {}) for text in texts) <= 0.6 * len(texts), "few of those that leave it open"


def test_the_verifier_math_has_a_second_judge_and_others_have_the_one_that_is_named():
    def audit(verifier, **validation):
        return tasks_of(small_recipe(rewards={"verifier": verifier}, validation=validation))[0].audit

    assert audit("math") == AUDITS["math"] and audit("code") is None
    assert audit("math", audit=None) is None and audit("code", audit="mine:judge") == "mine:judge"


LENIENT = "def pays(text, reference, extra):\n    return reference in text\n"


async def test_a_correct_answer_is_shown_to_the_second_judge_and_keeps_its_reward(tmp_path, monkeypatch):
    (tmp_path / "lenient.py").write_text(LENIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"rewards": {"verifier": "lenient:pays", "workers": 1}, "validation": {"audit": AUDITS["math"]}}
    row = prompt(answer="14")
    async with TaskPools(tasks_of(small_recipe(**settings))) as pools:
        right, unconfirmed, wrong = [await pools.score(text, row) for text in ("It is 14.", "14 or 13", "15")]
    assert right == Score(correct=True, reward=1.0, confirmed=True)
    assert unconfirmed == Score(correct=True, reward=1.0, confirmed=False)
    assert wrong == Score(correct=False, reward=-1.0)


async def test_an_answer_without_a_verdict_of_the_second_judge_is_neither(tmp_path, monkeypatch, caplog):
    (tmp_path / "away.py").write_text("async def judge(text, reference, extra):\n    raise ConnectionError('down')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))
    [task] = tasks_of(small_recipe(rewards={"workers": 1}, validation={"audit": "away:judge"}))
    async with TaskPools([task]) as pools:
        score = await pools.score("\\boxed{14}", prompt(answer="14"))
    assert score == Score(correct=True, reward=1.0)
    assert "validation.audit: the second judge gave no verdict on an answer" in caplog.text

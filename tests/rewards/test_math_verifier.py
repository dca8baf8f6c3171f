"""math-verify on the text after thinking."""

import asyncio

import pytest
from verifier_pools import prompt

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.math import extract_answer, verify_math
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import Score

RIGHT = [
    ("7", "7"),
    ("7", " 7\n"),
    ("7", "The answer is \\boxed{7}."),
    ("\\frac{1}{2}", "$\\frac{2}{4}$"),
    ("\\frac{1}{2}", "so it is \\(\\frac12\\)"),
    ("\\frac{1}{2}", "\\boxed{0.5}"),
    ("1/2", "0.5"),
    ("\\sqrt{2}", "\\boxed{\\sqrt{2}}"),
    ("x^2+1", "$1+x^2$"),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
    ("1,000", "1000"),
]
WRONG = [
    ("7", "8"),
    ("7", "-7"),
    ("7", "7 or 8"),
    ("7", "\\boxed{7} or \\boxed{8}"),
    ("7", "no idea"),
    ("$\\frac{1}{2}$", "\\boxed{\\frac{1}{3}}"),
    ("2", "\\frac{1}{2}"),
    ("\\sqrt{2}", "\\boxed{1.5}"),
]
RIGHT_BOX = [
    ("5", "\\boxed{3} no wait \\boxed{5}"),
    ("5", "\\boxed{3}, \\boxed{5}"),
    ("\\{1,2\\}", "\\boxed{1,2}"),
    ("5", "\\boxed{5}, since $7 = 5 + 2$. Checked for 7 cases."),
    ("5", "$x = 3$, so $$\\boxed{5}$$ cm"),
    ("\\frac{1}{2}", "\\boxed{3}, no, \\boxed{\\frac{1}{{2}}}"),
    ("5", "\\boxed{3} \\boxed 5"),
    ("5", "\\(\\boxed5\\)."),
    ("5!", "$\\boxed 5!$"),
    ("5", "\\boxed{3} then \\fbox{5}"),
    ("5", "\\boxed{\\boxed{5}}"),
    ("7", "\\boxed{5 and \\boxed{7}"),
    ("5", "\\boxed{5}, and \\boxed{unfinished"),
    ("0.5", "$\\boxed{50}$%"),
    ("\\boxed{5}", "\\boxed{3} \\boxed{5}"),
    ("\\boxed{1}, \\boxed{2}", "\\boxed{1,2}"),
]
WRONG_BOX = [
    ("3", "\\boxed{3} no wait \\boxed{5}"),
    ("\\{1,2\\}", "\\boxed{1} and \\boxed{2}"),
    ("7", "\\boxed{5}. The final answer is $7$. I hope it is correct."),
    ("5", "\\boxed{}"),
    ("5", "\\boxed"),
]


@pytest.mark.parametrize("rows, right", [(RIGHT, True), (WRONG, False), (RIGHT_BOX, True), (WRONG_BOX, False)])
def test_answers_are_compared_as_mathematics_and_the_last_box_is_the_answer(rows, right):
    """rows: reference and answer."""
    assert [row for row in rows if verify_math(row[1], row[0], {}) is not right] == []


def test_the_answer_is_the_text_after_the_first_closing_tag():
    assert extract_answer("1+1=2</think>2", "</think>") == "2"
    assert extract_answer("1+1=2</think>2</think>3", "</think>") == "2</think>3"
    assert extract_answer("</think>", "</think>") == ""
    assert extract_answer("1+1=2", "</think>") is None
    assert extract_answer("plan [/THINK] done", "[/THINK]") == " done"


async def score_all(answers, reference, **rewards):
    async with VerifierPool(RewardsSection(timeout_s=600, **rewards)) as pool:
        return await asyncio.gather(*(pool.score(answer, prompt(answer=reference)) for answer in answers))


HEAVY = ["\\frac{9^{9^9}}{8^{9^9}}", "9^{9^9}", "99999999!"]


async def test_the_pool_runs_it_by_name_and_kills_a_check_that_does_not_end():
    scores = await score_all(
        [*(f"\\boxed{{{heavy}}}" for heavy in HEAVY), "$\\frac{\\pi}{2}$", "2"], "0.5\\pi", workers=2, cpu_s=0.5
    )
    assert all(score == Score(correct=False, reward=-1.0, reason=score.reason) for score in scores[:3])
    assert {score.reason for score in scores[:3]} <= {"timeout", "memory"}
    assert scores[3:] == [Score(correct=True, reward=1.0), Score(correct=False, reward=-1.0)]


async def test_degenerate_repetition_is_checked_within_the_limits():
    """Quadratic work on 20,000 repetitions takes minutes."""
    answers = [repeated * 20_000 for repeated in ("\\boxed{", "\\boxed ", "\\boxed{1}", "\\{\\boxed{", "$ ", "}{")]
    scores = await score_all(answers, "7", workers=1, cpu_s=10)
    assert scores == [Score(correct=False, reward=-1.0)] * len(answers)

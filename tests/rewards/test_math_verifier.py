"""math-verify on the text after thinking."""

import asyncio

import pytest

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.math import extract_answer, verify_math
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import Prompt, Score

CASES = [
    ("7", "7", True),
    ("7", "8", False),
    ("7", " 7\n", True),
    ("7", "-7", False),
    ("7", "The answer is \\boxed{7}.", True),
    ("7", "7 or 8", False),
    ("7", "\\boxed{7} or \\boxed{8}", False),
    ("7", "no idea", False),
    ("\\frac{1}{2}", "$\\frac{2}{4}$", True),
    ("\\frac{1}{2}", "so it is \\(\\frac12\\)", True),
    ("\\frac{1}{2}", "\\boxed{0.5}", True),
    ("1/2", "0.5", True),
    ("$\\frac{1}{2}$", "\\boxed{\\frac{1}{3}}", False),
    ("2", "\\frac{1}{2}", False),
    ("\\sqrt{2}", "\\boxed{\\sqrt{2}}", True),
    ("\\sqrt{2}", "\\boxed{1.5}", False),
    ("x^2+1", "$1+x^2$", True),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", True),
    ("1,000", "1000", True),
]


@pytest.mark.parametrize(("reference", "answer", "expected"), CASES)
def test_answers_are_compared_as_mathematics(reference, answer, expected):
    assert verify_math(answer, reference, {}) is expected


BOXES = [
    ("5", "\\boxed{3} no wait \\boxed{5}", True),
    ("3", "\\boxed{3} no wait \\boxed{5}", False),
    ("5", "\\boxed{3}, \\boxed{5}", True),
    ("\\{1,2\\}", "\\boxed{1} and \\boxed{2}", False),
    ("\\{1,2\\}", "\\boxed{1,2}", True),
    ("5", "\\boxed{5}, since $7 = 5 + 2$. Checked for 7 cases.", True),
    ("7", "\\boxed{5}. The final answer is $7$. I hope it is correct.", False),
    ("5", "$x = 3$, so $$\\boxed{5}$$ cm", True),
    ("\\frac{1}{2}", "\\boxed{3}, no, \\boxed{\\frac{1}{{2}}}", True),
    ("5", "\\boxed{3} \\boxed 5", True),
    ("5", "\\(\\boxed5\\).", True),
    ("5!", "$\\boxed 5!$", True),
    ("5", "\\boxed{3} then \\fbox{5}", True),
    ("5", "\\boxed{\\boxed{5}}", True),
    ("7", "\\boxed{5 and \\boxed{7}", True),
    ("5", "\\boxed{5}, and \\boxed{unfinished", True),
    ("0.5", "$\\boxed{50}$%", True),
    ("\\boxed{5}", "\\boxed{3} \\boxed{5}", True),
    ("\\boxed{1}, \\boxed{2}", "\\boxed{1,2}", True),
    ("5", "\\boxed{}", False),
    ("5", "\\boxed", False),
]


@pytest.mark.parametrize(("reference", "answer", "expected"), BOXES)
def test_the_last_box_is_the_answer(reference, answer, expected):
    assert verify_math(answer, reference, {}) is expected


def test_the_answer_is_the_text_after_the_first_closing_tag():
    assert extract_answer("1+1=2</think>2", "</think>") == "2"
    assert extract_answer("1+1=2</think>2</think>3", "</think>") == "2</think>3"
    assert extract_answer("</think>", "</think>") == ""
    assert extract_answer("1+1=2", "</think>") is None
    assert extract_answer("plan [/THINK] done", "[/THINK]") == " done"


def score_all(answers, reference, **rewards):
    prompt = Prompt(prompt_id="p", text="t", answer=reference, token_ids=())

    async def main():
        async with VerifierPool(RewardsSection(timeout_s=600, **rewards)) as pool:
            return await asyncio.gather(*(pool.score(answer, prompt) for answer in answers))

    return asyncio.run(main())


HEAVY = ["\\frac{9^{9^9}}{8^{9^9}}", "9^{9^9}", "99999999!"]


def test_the_pool_runs_it_by_name_and_kills_a_check_that_does_not_end():
    scores = score_all(
        [*(f"\\boxed{{{heavy}}}" for heavy in HEAVY), "$\\frac{\\pi}{2}$", "2"], "0.5\\pi", workers=2, cpu_s=0.5
    )
    assert all(score == Score(correct=False, reward=-1.0, reason=score.reason) for score in scores[:3])
    assert {score.reason for score in scores[:3]} <= {"timeout", "memory"}
    assert scores[3:] == [Score(correct=True, reward=1.0), Score(correct=False, reward=-1.0)]


def test_degenerate_repetition_is_checked_within_the_limits():
    """Quadratic work on 20,000 repetitions takes minutes."""
    answers = [repeated * 20_000 for repeated in ("\\boxed{", "\\boxed ", "\\boxed{1}", "\\{\\boxed{", "$ ", "}{")]
    scores = score_all(answers, "7", workers=1, cpu_s=10)
    assert scores == [Score(correct=False, reward=-1.0)] * len(answers)

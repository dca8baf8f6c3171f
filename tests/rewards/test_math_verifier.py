"""math-verify on the text after thinking."""

import asyncio

import pytest

from megatron_scalerl.recipe_sections import RewardsSection
from megatron_scalerl.rewards.math import extract_answer, verify_math
from megatron_scalerl.rewards.verifier import VerifierPool
from megatron_scalerl.types import Prompt, Rollout, Score

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


def test_the_answer_is_the_text_after_the_first_closing_tag():
    assert extract_answer("1+1=2</think>2", "</think>") == "2"
    assert extract_answer("1+1=2</think>2</think>3", "</think>") == "2</think>3"
    assert extract_answer("</think>", "</think>") == ""
    assert extract_answer("1+1=2", "</think>") is None
    assert extract_answer("plan [/THINK] done", "[/THINK]") == " done"


def test_the_pool_runs_it_by_its_name_and_kills_what_does_not_end():
    """A tower of powers is parsed by sympy for ever."""
    prompt = Prompt(prompt_id="p", text="t", answer="\\frac{1}{2}", token_ids=())
    rollout = Rollout(
        token_ids=(), rollout_logprobs=(), policy_versions=(), loss_mask=(), interrupted=False,
        truncated=False, thinking_cut=0, seed=0,
    )  # fmt: skip

    async def main():
        async with VerifierPool(RewardsSection(workers=1)) as pool:
            answers = ("$9^{9^{9^{9}}}$", "0.5", "2")
            return await asyncio.gather(*(pool.score(answer, prompt, rollout) for answer in answers))

    tower, half, two = asyncio.run(main())
    assert tower == Score(correct=False, reward=-1.0, reason="timeout")
    assert half == Score(correct=True, reward=1.0)
    assert two == Score(correct=False, reward=-1.0)

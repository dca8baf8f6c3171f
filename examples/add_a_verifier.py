"""A custom verifier: the answer must be a JSON list of the reference's numbers, in any order.

Set it in a recipe, and start the run with PYTHONPATH=examples:

    rewards:
      verifier: add_a_verifier:same_numbers
      timeout_s: 2

`python examples/add_a_verifier.py` tries it in the same killable processes that a run uses.
"""

import asyncio
import json
from typing import Any

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import Prompt


def same_numbers(answer_text: str, reference: str, extra: dict[str, Any]) -> bool | float:
    """The score of one completion.

    `answer_text` is the completion's text after thinking, `reference` the prompt's answer column, `extra` the other
    columns of its row, with the question as `prompt`. True gives the reward `rewards.correct`, False
    `rewards.incorrect`; a float is the reward itself. A check that exceeds its limits (`cpu_s`, `timeout_s`,
    `memory_mb`) counts as wrong, and so does an answer for which this raises, as here for a text that is no JSON,
    if the reference has a reward. Identical arguments are checked once.
    """
    numbers = json.loads(answer_text)
    if sorted(numbers) != sorted(json.loads(reference)):
        return False
    # If the row requires the order too, the right numbers in the wrong order get a partial reward.
    if extra.get("ordered") and numbers != json.loads(reference):
        return 0.5
    return True


async def main() -> None:
    """Score five answers to one prompt and print their rewards."""
    prompt = Prompt(
        prompt_id="example", text="Roots of x^2 - 3x + 2?", answer="[1, 2]", token_ids=(), extra={"ordered": True}
    )
    rewards = RewardsSection(verifier="add_a_verifier:same_numbers", workers=2, timeout_s=2.0)
    async with VerifierPool(rewards) as pool:
        for answer in ("[1, 2]", "[2, 1]", "[1, 3]", "one and two", None):
            score = await pool.score(answer, prompt)
            print(f"{answer!s:12} reward {score.reward:+.1f} {score.reason}")


if __name__ == "__main__":
    asyncio.run(main())

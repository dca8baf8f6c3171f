"""Verifier pools with the verifiers of users_verifiers.py, for tests of checks and processes."""

import asyncio

from recipe_files import small_recipe
from worker_pools import count_restarts

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import Prompt, Score

RIGHT = Score(correct=True, reward=1.0)
WRONG = Score(correct=False, reward=-1.0)


def wrong(reason):
    return Score(correct=False, reward=-1.0, reason=reason)


def prompt(extra=None, *, answer="7", **changes):
    """A prompt whose reference answer is 7."""
    values = {"prompt_id": "p", "text": "t"} | changes
    return Prompt(answer=answer, token_ids=(), extra=extra or {}, **values)


def task(verifier, name="", **rewards):
    """A task with one worker."""
    section = RewardsSection(verifier=verifier, **{"workers": 1, "timeout_s": 60.0} | rewards)
    return Task(name=name, weight=1.0, recipe=small_recipe(rewards=section))


def pool_of(function, *, start_timeout_s=60.0, **rewards):
    """A pool of one worker with ample limits by default."""
    verifier = function if ":" in function or function == "mathe" else f"users_verifiers:{function}"
    section = {"workers": 1, "timeout_s": 60.0, "cpu_s": 60.0, **rewards}
    return count_restarts(VerifierPool(RewardsSection(verifier=verifier, **section), start_timeout_s=start_timeout_s))


def run_pool(function, answers, *, extra=None, **rewards):
    """(scores or exceptions of concurrent checks of the answers, processes that were replaced)."""

    async def main():
        async with pool_of(function, **rewards) as pool:
            calls = [pool.score(answer, prompt(extra)) for answer in answers]
            return await asyncio.gather(*calls, return_exceptions=True), pool.restarts

    return asyncio.run(main())

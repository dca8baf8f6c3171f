"""An outage of what a verifier asks is never paid, and an answer that breaks its judge is: in virtual time."""

import asyncio
import itertools
import math
import random

import pytest
from fakes.run import in_virtual_time
from fakes.verifier_workers import StandInWorkers
from sampling import sampled
from verifier_pools import prompt

from megatron_scalerl.recipe.sections import RewardsSection
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import CompletionLost

ANSWERS = 1024
GROUP = 16
CELLS = list(
    itertools.product(
        (0.02, 0.09, 0.2, 0.43, 1.0), (10.0, 60.0, math.inf), (1, 8, 30), (64, 768), ("raised", "unavailable", "died")
    )
)
"""Share of answers for the judge, seconds of its outage, calls an answer, checks in flight, kind of failure."""


def answers_of(share, word, seed):
    """(text, prompt) of the answers; a share of them is for the judge."""
    draw = random.Random(seed)
    chosen = set(draw.sample(range(ANSWERS), round(share * ANSWERS)))
    texts = [f"{word if number in chosen else 'malformed'} {number}" for number in range(ANSWERS)]
    return [(text, prompt({"row": number // GROUP})) for number, text in enumerate(texts)]


def scored(workers, answers, in_flight, seed):
    """Text -> score, or what was raised, of answers that come as completions of 5 to 15 s end."""
    draw = random.Random(seed)
    pauses = [draw.uniform(5.0, 15.0) for _ in answers]
    scores = {}

    async def main():
        pool = VerifierPool(RewardsSection(verifier="users_verifiers:same", workers=1))
        pool._workers = workers
        slots = asyncio.Semaphore(in_flight)

        async def complete(text, row, pause_s):
            async with slots:
                await asyncio.sleep(pause_s)
                try:
                    scores[text] = await pool.score(text, row)
                except (CompletionLost, RuntimeError) as lost:
                    scores[text] = lost

        await asyncio.gather(*(complete(*answer, pause_s) for answer, pause_s in zip(answers, pauses)))

    in_virtual_time(main())
    return scores


@pytest.mark.parametrize("share, seconds, calls, in_flight, kind", sampled("outages", CELLS, 3))
def test_an_outage_is_never_paid(share, seconds, calls, in_flight, kind):
    seed = f"{share} {seconds} {calls} {in_flight} {kind}"
    begin = random.Random(seed).uniform(0.0, 25.0)
    workers = StandInWorkers(kind, calls, (begin, begin + seconds))
    scores = scored(workers, answers_of(share, "judge", seed), in_flight, seed)
    asked = [score for text, score in scores.items() if text.startswith("judge")]
    assert [score for score in asked if not isinstance(score, Exception) and not score.correct] == []
    assert len(scores) == ANSWERS
    others = {getattr(score, "reason", "the run ended") for text, score in scores.items() if "malformed" in text}
    assert others <= {"", "the run ended"}
    if workers.ended is None and seconds == 10.0:
        assert any(getattr(score, "correct", False) for score in asked), "the judge came back"


@pytest.mark.parametrize("share, kind", list(itertools.product((0.02, 0.15, 0.4), ("raised", "unavailable", "died"))))
def test_an_answer_that_breaks_its_judge_is_wrong(share, kind):
    workers = StandInWorkers(kind, 1, (math.inf, math.inf))
    answers = answers_of(share, "judge breaks", f"breaks {share} {kind}")
    answers = [(text.replace("malformed", "judge"), row) for text, row in answers]
    scores = scored(workers, answers, 64, kind)
    broken = [score for text, score in scores.items() if "breaks" in text]
    reason = {"raised": "error", "died": "crash"}.get(kind, kind)
    assert sum(getattr(score, "reason", "") == reason for score in broken) >= 0.95 * len(broken)
    assert workers.ended is None
    assert all(score.correct for text, score in scores.items() if "breaks" not in text)

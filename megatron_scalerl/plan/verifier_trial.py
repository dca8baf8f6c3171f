"""The trial of a user's verifier on the first rows of the prompts, which shows mistakes before a run starts."""

import asyncio
import logging
from pathlib import Path

from megatron_scalerl.prompts.layouts import read_layout
from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.forms import forms_of
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rewards.worker import Outcome
from megatron_scalerl.types import Prompt

logger = logging.getLogger(__name__)

ROWS = 5
"""Number of rows of each task whose answers are tried."""
MALFORMED = ("\\boxed{-918273645}", "I do not know.", "", "The answer is \\boxed{")
"""Answers that are tried besides the reference: a wrong answer, a text without an answer, an empty text and a
truncated answer."""


def try_verifier(task: Task) -> None:
    """Call the user's verifier of a task with right and malformed answers to the first rows.

    Raises ValueError, in one line, for a verifier that returns something that is no reward, or no reward for any of
    the answers. The trial only warns if the verifier's judge cannot be reached, or if a variable is not set.
    """
    verifier = task.rewards.verifier
    path = task.prompts.path
    if ":" not in verifier or task.episodes or path is None or not Path(path).exists():
        return
    try:
        pool = VerifierPool(task.rewards)
    except ValueError as unset:
        logger.warning("rewards.verifier %r was not tried: %s", verifier, unset)
        return
    asyncio.run(_try_rows(pool, task, _rows(task)))


def _rows(task: Task) -> list[Prompt]:
    """The task's first readable rows, as prompts."""
    layout, rows = read_layout(str(task.prompts.path), task.prompts, task.rewards.verifier)
    prompts: list[Prompt] = []
    for row in rows:
        try:
            text = layout.question_of(row.readable()).text
            answer = layout.reference_of(row, task.rewards.verifier)
        # An unreadable row is skipped here, and reported where all rows are read.
        except ValueError:
            continue
        prompts.append(Prompt(prompt_id=row.where, text=text, answer=answer, token_ids=(), extra=layout.others(row)))
        if len(prompts) == ROWS:
            break
    return prompts


async def _try_rows(pool: VerifierPool, task: Task, prompts: list[Prompt]) -> None:
    """Call the verifier in the processes of a pool. Raises and warns as `try_verifier` does."""
    head = f"rewards.verifier {task.rewards.verifier!r}"
    outcomes: list[Outcome] = []
    right = False
    async with pool:
        for prompt in prompts:
            forms = forms_of(prompt.answer, prompt.extra)
            texts = [*forms, *MALFORMED]
            row_outcomes = await asyncio.gather(*(pool.outcome(text, prompt) for text in texts))
            for text, outcome in zip(texts, row_outcomes):
                if outcome.returned:
                    raise ValueError(f"{head}: {prompt.prompt_id}: for the answer {text!r} {outcome.returned}")
            values = [outcome.value for outcome in row_outcomes if outcome.value is not None]
            right |= any(pool.paid(value, prompt, tokens=0).correct for value in values)
            outcomes += row_outcomes
            # A row that exceeded a limit of time or memory ends the trial, because further rows could take as long.
            if any(outcome.limit for outcome in row_outcomes):
                break
    unreached = [outcome.reason for outcome in outcomes if outcome.unavailable and not outcome.error]
    if any(outcome.value is not None for outcome in outcomes):
        if not right:
            logger.warning(
                "%s: the verifier scores no reference answer of the first %d rows as right", head, len(prompts)
            )
    elif unreached:
        logger.warning("%s was not tried: %s", head, unreached[0])
    elif outcomes:
        reason = (outcomes[0].error or outcomes[0].limit).strip().splitlines()[-1]
        raise ValueError(
            f"{head} gives no reward for any of {len(outcomes)} answers, not even for the reference of "
            f"{prompts[0].prompt_id}: {reason}"
        )

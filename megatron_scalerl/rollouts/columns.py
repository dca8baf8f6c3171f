"""Adds the algorithm's columns, such as a teacher's log-probabilities, to each token of a group before storage."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.rollout_bytes import RolloutArrays, read, write
from megatron_scalerl.engine.answers import EngineLost
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.recipe import TEACHER
from megatron_scalerl.types import RolloutGroup

logger = logging.getLogger(__name__)
PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses between the tries of an algorithm's `score` (s). A judge that is down for a minute must not end the run."""
SCORE_S = 600.0
"""Time limit of one try of an algorithm's `score` (s), since a judge that never answers would hold up the batch."""


Score = Callable[[RolloutGroup, Sequence[RolloutArrays]], Awaitable[Sequence[Mapping[str, Any]]]]


class Teachers:
    """Asks the teacher of a group's task for the log-probabilities of the group's samples, with a request per sample.

    A request that fails because the teacher's process ended is repeated as soon as the teacher runs again. Requests
    have no time limit: `engine.watchdog` ends a teacher that hangs, and a teacher that is given up ends the run.
    """

    def __init__(self, recipe: Recipe, engines: Membership):
        self._sections = recipe.algorithm.teachers
        self._engines = engines

    async def score(self, group: RolloutGroup, samples: Sequence[RolloutArrays]) -> list[dict[str, Any]]:
        """[samples] the column `teacher_logprobs` (nats) of each sample. Raises EngineError if a request fails."""
        task = group.prompt.task
        name = TEACHER + next(name for name, section in self._sections.items() if task in (section.tasks or [task]))
        parts = [part for completion in group.completions for part in completion.samples]
        prompts = [group.prompt.token_ids[: part.prompt_tokens] for part in parts]
        async with asyncio.TaskGroup() as requests:
            columns = [requests.create_task(self._column(name, *both)) for both in zip(prompts, samples, strict=True)]
        return [column.result() for column in columns]

    async def _column(self, name: str, prompt: Sequence[int], sample: RolloutArrays) -> dict[str, Any]:
        ids = [*prompt, *sample.token_ids.tolist()]
        while True:
            await self._engines.until(lambda: self._engines.teacher(name) is not None)
            teacher = self._engines.teacher(name)
            assert teacher is not None, name
            try:
                logprobs = await teacher.score(ids)
            except EngineLost:
                continue
            # No teacher scores the first token of a text, since nothing comes before this token.
            by_token = np.array([0.0, *logprobs])[len(prompt) :]
            return {"teacher_logprobs": np.where(sample.loss_mask, by_token, 0.0)}


async def with_columns(
    algorithm: ScaleRL, group: RolloutGroup, samples: Sequence[bytes], score: Score | None = None
) -> list[bytes]:
    """The samples of a group with the columns of `score`, in the format of `rollout_bytes.write`.

    score: `Teachers.score`, which gets no time limit; None: the algorithm's method `score`.

    Raises RuntimeError, which ends the run, if every try failed: `score` raised, took more than `SCORE_S`, or
    returned columns that `scored` refuses.
    """
    arrays = [read(sample) for sample in samples]
    for pause_s in (*PAUSES_S, None):
        try:
            async with asyncio.timeout(None if score else SCORE_S):
                columns = await (score or algorithm.score)(group, arrays)
            return [write(scored(sample, named, algorithm)) for sample, named in zip(arrays, columns, strict=True)]
        except Exception as error:
            if pause_s is None:
                raise RuntimeError(
                    f"algorithm: score() for group {group.group_id} failed in every try; the last error: {error!r}"
                ) from error
            logger.warning("algorithm: score() for group %d failed, and is tried again: %r", group.group_id, error)
            await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def scored(sample: RolloutArrays, named_columns: Mapping[str, Any], algorithm: ScaleRL) -> RolloutArrays:
    """A sample with the columns that `score` returned.

    Raises ValueError for names that are not the algorithm's columns, and for a sampled token without a finite number:
    after a restart stored columns are used again, so a stored NaN would end the run each time.
    """
    if {*named_columns} != {*algorithm.columns}:
        raise ValueError(f"score returned the columns {sorted(named_columns)} instead of {sorted(algorithm.columns)}")
    with np.errstate(over="ignore"):
        columns = {name: np.asarray(named_columns[name], np.float32) for name in algorithm.columns}
    for name, column in columns.items():
        if column.shape != sample.loss_mask.shape or not np.isfinite(column[sample.loss_mask]).all():
            raise ValueError(
                f"column {name} has shape {column.shape}, and has to have a finite number for each of the "
                f"{len(sample.loss_mask)} tokens"
            )
    return replace(sample, columns=columns)

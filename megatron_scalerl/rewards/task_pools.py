"""The verifier pools of a run: one for each task, so that slow checks of one task do not hold up the other's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megatron_scalerl.recipe.tasks import Task
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.types import Prompt, Score


class TaskPools:
    """Scores each completion in the pool of its prompt's task; `async with` starts and closes the pools."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._pools = {task.name: VerifierPool(task.rewards) for task in tasks}
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TaskPools:
        """Raises as `VerifierPool.start`; pools that were started are closed then."""
        async with contextlib.AsyncExitStack() as started:
            for pool in self._pools.values():
                await started.enter_async_context(pool)
            self._running = started.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._running.aclose()

    async def score(
        self, text_after_thinking: str | None, prompt: Prompt, *, truncated: bool = False, tokens: int = 0
    ) -> Score:
        """As `VerifierPool.score`."""
        return await self._pools[prompt.task].score(text_after_thinking, prompt, truncated=truncated, tokens=tokens)

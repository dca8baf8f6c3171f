"""Pools of the environments of users_environments.py, and what an episode of one returns."""

import asyncio
from contextlib import asynccontextmanager

from megatron_scalerl.environments.pool import EnvironmentFailed, EnvironmentPool
from megatron_scalerl.environments.response import Response
from megatron_scalerl.recipe.sections import EnvironmentSection


def section(name, **options):
    spec = name if ":" in name else f"users_environments:{name}"
    return EnvironmentSection(name=spec, **{"workers": 1, **options})


@asynccontextmanager
async def pool_of(name, folder, **options):
    async with EnvironmentPool(section(name, **options), logs=folder / "logs") as pool:
        yield pool


async def played(pool, row, texts, *, after=lambda turn: asyncio.sleep(0)):
    """(what reset returned, turns as tuples), or the error with the turns before it as `turns`."""
    turns = []
    try:
        async with pool.episode(row) as episode:
            [first] = await episode.reset()
            turns.append(first["content"])
            for text in texts:
                turn = await episode.step(Response(text=text))
                turns.append((*(m["content"] for m in turn.messages), turn.reward, turn.done))
                await after(turn)
    except EnvironmentFailed as failure:
        failure.turns = turns
        return failure
    return turns


def counted(start, *numbers):
    """The turns of `Counting`."""
    turns = [f"begin at {start}"]
    for number in numbers:
        start += number
        turns.append((f"now {start}", float(start), start >= 100))
    return turns

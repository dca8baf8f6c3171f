"""Completes problems on the engines that hold one policy version, and scores the completions.

Consumes: requests, in their order, and the engines' slots.
Waits for: each completion and its score, and for an engine that holds the version.
Unblocked by: the engines and the verifier. An answer of another policy version evicts its engine: a result is of one
version or is refused. A completion whose engine is evicted is generated again, with its seed and interruption point,
on another engine; one that is lost (`CompletionLost`) is tried once more and then recorded as lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.evaluation.results import Key, Row
from megatron_scalerl.rollouts.plans import Draw
from megatron_scalerl.rollouts.run_text import RunTokenizer, raw_text
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, Prompt

logger = logging.getLogger(__name__)

TRIES = 2
"""Attempts at a completion, with the same seed and interruption point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to generate."""

    key: Key
    problem_id: str
    prompt: Prompt
    draw: Draw
    sampler: Sampler
    """Of the key's budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holders:
    """The engines that hold the version, and what to do with one that answers with another."""

    next: Callable[[int], Awaitable[EngineClient]]
    """Waits for an engine for problem number n."""
    evict: Callable[[EngineClient, str], None]


async def complete(
    request: Request, holders: Holders, *, version: int, priority: int
) -> ScoredCompletion | CompletionLost:
    """One completion by policy version `version`, or why it is lost. Raises RuntimeError as `Sampler.complete`."""
    tries = 0
    while True:
        engine = await holders.next(request.key.number)
        try:
            found = await request.sampler.complete(engine, request.prompt, request.draw, priority=priority)
            check_version(engine, found, version)
            return found
        except CompletionLost as lost:
            logger.warning("%s, problem %d: a completion is lost: %s", request.key.file, request.key.number, lost)
            tries += 1
            if tries == TRIES:
                return lost
        except EngineError as error:
            holders.evict(engine, str(error))


def check_version(engine: EngineClient, found: ScoredCompletion, version: int) -> None:
    """Raises EngineError for a completion with a token of another policy version; versions never decrease in one."""
    versions = {found.completion.first_version, found.completion.last_version}
    if versions != {version}:
        raise EngineError(f"{engine.name}: policy versions: expected {version}, found {sorted(versions)}")


async def complete_all(
    requests: Iterable[Request],
    holders: Holders,
    *,
    version: int,
    at_once: int,
    priority: int,
    tokenizer: RunTokenizer,
    finished: Callable[[Row], None],
) -> None:
    """Complete every request, `at_once` at a time. finished: called with each row as soon as it is scored."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            found = await complete(request, holders, version=version, priority=priority)
            finished(row_of(request, found, tokenizer))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())


def row_of(request: Request, found: ScoredCompletion | CompletionLost, tokenizer: RunTokenizer) -> Row:
    """What is recorded of a completion."""
    draw = request.draw
    if isinstance(found, CompletionLost):
        return Row(
            key=request.key,
            problem_id=request.problem_id,
            correct=False,
            seed=draw.seed,
            cut=draw.thinking_cut,
            lost=found.reason,
        )
    done = found.completion
    return Row(
        key=request.key,
        problem_id=request.problem_id,
        correct=found.score.correct,
        reason=found.score.reason,
        tokens=done.tokens,
        sampled_tokens=done.sampled_tokens,
        interrupted=done.interrupted,
        truncated=done.truncated,
        versions=(done.first_version, done.last_version),
        seed=draw.seed,
        cut=draw.thinking_cut,
        text=raw_text(tokenizer, read(found.data).token_ids.tolist()),
    )

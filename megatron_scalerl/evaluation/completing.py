"""Completes problems on the engines that hold one policy version, and scores the completions.

Consumes: requests, in their order, and the engines' slots, at a higher priority than training completions.
Waits for: each completion and its score, and for an engine that holds the version.
Unblocked by: the engines and the verifier. An engine that answers with another policy version is evicted: every
result has one version. A completion whose engine is evicted is generated again on another engine, with the same seed
and interruption point. A lost completion (`CompletionLost`) is tried once more and then recorded as lost. If a single
engine is held at the version, an eviction of this engine ends the measurement: HeldEngineLost.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.engine.rounds import Rounds
from megatron_scalerl.evaluation.results import Key, Row
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.plans import VALIDATION_PRIORITY, Draw
from megatron_scalerl.rollouts.run_text import RunTokenizer, raw_text
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, Prompt

logger = logging.getLogger(__name__)

TRIES = 2
"""Number of attempts at a completion, all with the same seed and interruption point."""


class HeldEngineLost(RuntimeError):
    """The engine that kept the policy version of a measurement was evicted."""


@record
class Request:
    """A completion to generate."""

    key: Key
    prompt: Prompt
    draw: Draw
    sampler: Sampler
    """The sampler for the key's budget."""


Finished = Callable[[Request, ScoredCompletion | CompletionLost], None]
"""A function that is called with each request and the result, as soon as the completion is scored or lost."""


@record
class Completer:
    """Completes requests with one policy version."""

    members: Membership
    version: int
    at_once: int
    """Number of requests in flight; with `rounds`, number of requests of each engine in a round."""
    only: EngineClient | None = None
    """The one engine that keeps the version during the measurement; None: every serving engine has the version."""
    rounds: Rounds | None = None
    """The rounds of a deterministic run (`engine.rounds`); None: requests do not wait for each other."""
    count: Callable[[int], object] = int
    """A function that is called with the number of generated tokens of each completion; the result is ignored."""

    async def engine(self, number: int) -> EngineClient:
        """The engine for problem `number`, shared by all completions of the problem. Raises HeldEngineLost if `only`
        was evicted."""
        if self.only is None:
            await self.members.until(lambda: bool(self.members.serving))
            serving = self.members.serving
            return serving[number % len(serving)]
        if self.only not in self.members.held:
            raise HeldEngineLost(f"{self.only.name}, which was held at policy version {self.version}, was evicted")
        return self.only

    async def complete(
        self, request: Request, finished: Finished, *, first: EngineClient | None = None, rank: int = 0
    ) -> None:
        """Complete one request. first: engine of the first attempt. rank: the request's place in a round.

        Raises HeldEngineLost if `only` was evicted, and RuntimeError as `Sampler.complete` does.
        """
        priority = VALIDATION_PRIORITY + rank
        result: ScoredCompletion | CompletionLost
        losses = 0
        while losses < TRIES:
            engine = first or await self.engine(request.key.number)
            # A second attempt asks for an engine anew, because the first engine may be evicted by then.
            first = None
            try:
                result = await request.sampler.complete(engine, request.prompt, request.draw, priority=priority)
                versions = {result.completion.first_version, result.completion.last_version}
                # One comparison of first and last version is enough, because versions never decrease in a completion.
                if versions != {self.version}:
                    served_versions = ", ".join(map(str, sorted(versions)))
                    raise EngineError(
                        f"{engine.name}: it answered with policy version {served_versions}, not {self.version}"
                    )
                self.count(result.completion.generated_tokens)
                break
            except CompletionLost as error:
                logger.warning(
                    "%s, problem %d: a completion is lost: %s", request.key.file, request.key.number, error
                )
                losses += 1
                result = error
            except EngineError as error:
                # The engine's failure does not count as an attempt at the completion.
                self.members.evict(engine, str(error))
        finished(request, result)

    async def complete_all(self, requests: Iterable[Request], finished: Finished) -> None:
        """Complete every request. If requests fail, raises the first failure that is no HeldEngineLost, or
        HeldEngineLost if every failure is a HeldEngineLost."""
        waiting = iter(requests)

        async def work() -> None:
            # All workers take requests from this iterator.
            for request in waiting:
                await self.complete(request, finished)

        try:
            if self.rounds is not None:
                await self._in_rounds(self.rounds, list(waiting), finished)
                return
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.at_once):
                    tasks.create_task(work())
        except BaseExceptionGroup as failures:
            # Many causes end in HeldEngineLost, so a failure of any other type says more about the cause.
            raise min(failures.exceptions, key=lambda error: isinstance(error, HeldEngineLost)) from None

    async def _in_rounds(self, rounds: Rounds, requests_left: list[Request], finished: Finished) -> None:
        while requests_left:
            this_round = await rounds.begin()
            chosen = requests_left[: self.at_once * this_round.size]
            requests_left = requests_left[len(chosen) :]
            engines = [this_round.engine(rank) for rank in range(len(chosen))]
            async with asyncio.TaskGroup() as tasks:
                for rank, request in enumerate(chosen):
                    tasks.create_task(self.complete(request, finished, first=engines[rank], rank=rank))
                await this_round.go(engines)


def row_of(request: Request, result: ScoredCompletion | CompletionLost, tokenizer: RunTokenizer) -> Row:
    """The row in which a completion is recorded."""
    row = partial(
        Row,
        key=request.key,
        problem_id=request.prompt.prompt_id,
        seed=request.draw.seed,
        cut=request.draw.thinking_cut,
    )
    if isinstance(result, CompletionLost):
        return row(correct=False, lost=result.reason)
    completion = result.completion
    texts = [raw_text(tokenizer, read(part).token_ids.tolist()) for part in result.parts]
    return row(
        correct=result.score.correct,
        reason=result.score.reason,
        tokens=completion.generated_tokens,
        sampled_tokens=completion.sampled_tokens,
        interrupted=completion.interrupted,
        truncated=completion.truncated,
        versions=(completion.first_version, completion.last_version),
        text="".join(texts),
    )

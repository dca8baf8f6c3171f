"""Episodes of several turns, each of which is one completion of its group.

    reset --messages--> render --ids--> generate --response--> step --messages--> render --> generate ... --> score

The life of an episode:

    reset      the environment's first messages become the prompt, which all episodes of the group share
    turn       the engine continues the ids so far; the ids that it samples are kept as they are, for good
    step       the environment answers the response, in a process of its own
    render     its new messages become ids (`prompts.turns`), which are appended; where the template rewrites what was
               said before, the episode forks: a new part begins with the rewritten context, all of it masked
    end        the environment says so, or a limit ends it: it is truncated then
    score      the environment's last verdict, or the sum of its numbers; without either, the verifier's verdict on
               the last response

Each token that the policy sampled is in one part, once. An episode stays on the engine of its group, whose prefix
cache has its context as long as the weights stay the same.

What fails in the environment is no reward (`environments.pool`): the episode is lost, or begins anew if a fresh
environment answers the same responses differently. A failure that is the episode's own is scored as the environment
declares. A prompt whose episodes fail by themselves, OWN_FAILURES in a row, is left out.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, facts_of_parts, joined, read, write
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.environments.pool import EnvironmentFailed, EnvironmentPool, Episode
from megatron_scalerl.environments.response import Message, Response
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.pool import TaskPools, VerifierPool
from megatron_scalerl.rollouts.decoder_pool import Decoded, DecoderPool
from megatron_scalerl.rollouts.plans import Draw, Plans
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion
from megatron_scalerl.types import CompletionLost, ExpertChoices, Prompt

TRIES = 3
"""Tries of an episode whose environment answers the same responses differently."""
OWN_REASONS = ("prompt", "template", "time", "changed")
"""Failures that are no outage."""
OWN_FAILURES = 16
"""Episodes of a prompt in a row that failed by themselves, after which it is left out."""


class Trace:
    """What policy and environment have written so far."""

    def __init__(self, prompt: np.ndarray):
        """prompt: [P] ids of the first messages."""
        self.context: list[int] = prompt.tolist()
        """All ids that the next turn continues."""
        self.turns: list[PastTurn] = []
        self.rewards: list[bool | float] = []
        self.text: str | None = None
        """The answer in the last turn."""
        self.truncated = True
        """Whether a limit ended the episode: so it is until the environment ends it."""
        self.failure = ""
        """The failure of the environment that is this episode's own, in one word; it is wrong then."""
        self.shared = [len(prompt)]
        """Tokens of the prompt with which each part begins."""
        self._prompt = prompt
        self._parts: list[list[RolloutArrays]] = [[]]
        """The parts, each in pieces: turns, and what the environment wrote between them."""

    @property
    def thinking(self) -> int:
        """Tokens of thinking in all turns; all of a turn in which it did not end."""
        return sum(turn.answer_start or len(turn.token_ids) for turn in self.turns)

    def add_turn(self, decoded: Decoded) -> None:
        """Append a turn of the policy."""
        arrays = read(decoded.data)
        ids = arrays.token_ids.tolist()
        self.turns.append(PastTurn(token_ids=tuple(ids), answer_start=decoded.answer_start))
        self.text = decoded.text
        self._parts[-1].append(arrays)
        self.context += ids

    def add_messages(self, ids: np.ndarray, *, rewritten: bool) -> None:
        """Append ids of the environment's messages [N]; or begin a part, of which they are the whole context."""
        turn = self._parts[-1][-1]
        if rewritten:
            self._parts.append([])
            size = min(len(ids), len(self._prompt))
            shared = int(np.cumprod(ids[:size] == self._prompt[:size]).sum())
            if not shared:
                raise EnvironmentFailed("the chat template changes the first token of the prompt", reason="template")
            self.shared.append(shared)
            self.context = ids[:shared].tolist()
            ids = ids[shared:]
        if len(ids):
            self._parts[-1].append(_environment(ids, turn))
            self.context += ids.tolist()

    def parts(self, draw: Draw) -> list[RolloutArrays]:
        """The samples of the episode, which ends."""
        if len(self._parts[-1][-1].environment):  # a limit came before the next turn
            self._parts[-1].pop()
        return [
            replace(
                joined(pieces),
                seed=draw.seed,
                thinking_cut=draw.thinking_cut,
                truncated=self.truncated,
                expert_choices=_choices(pieces),
            )
            for pieces in self._parts
            if pieces
        ]


def _environment(ids: np.ndarray, turn: RolloutArrays) -> RolloutArrays:
    """Ids [N] that the environment wrote after a turn."""
    size = len(ids)
    return replace(
        turn,
        token_ids=ids,
        rollout_logprobs=np.zeros(size, "<f4"),
        policy_versions=np.repeat(turn.policy_versions[-1:], size),
        loss_mask=np.zeros(size, bool),
        interrupted=False,
        expert_choices=None,
        environment=np.array([[0, size]], np.int64),
    )


def _choices(pieces: Sequence[RolloutArrays]) -> ExpertChoices | None:
    """The experts of all tokens: each request reports those of its whole context, and the first report counts."""
    reports = [piece.expert_choices for piece in pieces if piece.expert_choices is not None]
    if not reports:
        return None
    data = b""
    for report in reports:
        data += report.data[len(data) :]
    return replace(reports[0], data=data)


class EpisodeSampler(Sampler):
    """Runs the episodes of prompts on engines, and scores them."""

    def __init__(self, recipe: Recipe, plans: Plans, *, environments: EnvironmentPool, **pools: Any):
        """pools: decoders and verifier, as for `Sampler`."""
        super().__init__(plans, **pools)
        self._environments = environments
        self._settings = recipe.environment
        self._most_tokens = plans.most_tokens
        self._most_prompt_tokens = recipe.prompts.max_prompt_tokens
        self._problems: dict[str, str] = {}
        """Prompts of which no episode ends, with the reason."""
        self._failures: Counter[str] = Counter()
        """Episodes of each prompt in a row that failed by themselves."""
        self._verified: set[str] = set()
        """Prompts with an episode that the verifier has scored."""

    async def problem_of(self, prompt: Prompt) -> str:
        """Why a prompt cannot be learned from, after its first episodes: all fail, or none may be paid."""
        problem = self._problems.get(prompt.prompt_id, "")
        if problem or prompt.prompt_id not in self._verified:
            return problem
        return await super().problem_of(prompt)

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int, max_tokens: int | None = None
    ) -> ScoredCompletion:
        """An episode with its score; with `max_tokens` one turn without an environment, for the probe.

        Raises as `Sampler.complete`; CompletionLost (`environment_REASON`) where the environment has failed, and
        RuntimeError where that goes on (`environments.pool`).
        """
        if max_tokens is not None:
            return await super().complete(engine, prompt, draw, priority=priority, max_tokens=max_tokens)
        for _ in range(TRIES):
            try:
                result = await self._episode(engine, prompt, draw, priority)
            except EnvironmentFailed as failure:
                lost = CompletionLost(str(failure), reason=f"environment_{failure.reason}")
                own = failure.repeated or failure.reason in OWN_REASONS
                if failure.reason != "changed":
                    break
            else:
                del self._failures[prompt.prompt_id]
                return result
        if own:
            self._failures[prompt.prompt_id] += 1
        if self._failures[prompt.prompt_id] >= OWN_FAILURES:
            self._problems[prompt.prompt_id] = str(lost)
        raise lost

    async def _episode(self, engine: EngineClient, prompt: Prompt, draw: Draw, priority: int) -> ScoredCompletion:
        """One try of an episode. Raises EnvironmentFailed."""
        row = prompt.row
        async with self._environments.episode(row) as environment:
            first, ids = await self._first(environment)
            prompt = replace(prompt, token_ids=tuple(ids.tolist()))
            trace = Trace(ids)
            try:
                async with asyncio.timeout(self._settings.episode_timeout_s):
                    await self._turns(engine, environment, [first], trace, draw, priority)
            except TimeoutError:
                if not trace.turns:
                    limit = f"{self._settings.episode_timeout_s:g} s"
                    raise EnvironmentFailed(
                        f"environment.episode_timeout_s: no turn ended within {limit}; raise it", reason="time"
                    ) from None
        return await self._scored(prompt, trace, draw)

    async def _first(self, environment: Episode) -> tuple[Sequence[Message], np.ndarray]:
        """The first messages, and their ids [P]. Raises EnvironmentFailed."""
        messages = await environment.reset()
        ids, _ = await self._rendered([messages], [])
        if not 1 <= len(ids) <= self._most_prompt_tokens:
            raise EnvironmentFailed(
                f"the environment's first messages have {len(ids)} tokens; they need at least 1, and at most "
                f"prompts.max_prompt_tokens, {self._most_prompt_tokens}",
                reason="prompt",
            )
        return messages, ids

    async def _turns(
        self,
        engine: EngineClient,
        environment: Episode,
        messages: list[Sequence[Message]],
        trace: Trace,
        draw: Draw,
        priority: int,
    ) -> None:
        """Alternate between policy and environment until one of them, or a limit, ends the episode."""
        for left in reversed(range(self._settings.max_turns)):
            spec = self._spec(trace, draw, priority)
            decoded = await engine.generate(trace.context, sampling=spec, decoder=self._decoders)
            trace.add_turn(decoded)
            if decoded.completion.truncated:
                return
            try:
                turn = await environment.step(Response(text=decoded.text or "", tool_calls=decoded.tool_calls))
            except EnvironmentFailed as failure:
                if not failure.repeated or self._environments.repeated_failure == "lost":
                    raise
                trace.truncated = False
                trace.failure = failure.reason
                return
            if turn.reward is not None:
                trace.rewards.append(turn.reward)
            trace.truncated = not turn.done
            if turn.done or not left:
                return
            messages.append(turn.messages)
            ids, rewritten = await self._rendered(messages, trace.turns)
            trace.add_messages(ids, rewritten=rewritten)
            if self._room(trace) <= 0:
                return

    async def _rendered(
        self, messages: Sequence[Sequence[Message]], turns: Sequence[PastTurn]
    ) -> tuple[np.ndarray, bool]:
        """As `DecoderPool.render`. Raises EnvironmentFailed for messages that the chat template refuses."""
        try:
            return await self._decoders.render(messages, turns)
        except ValueError as problem:
            self._environments.end(self._environments.outages.ended(str(problem)))
            raise EnvironmentFailed(str(problem), reason="template") from None

    def _spec(self, trace: Trace, draw: Draw, priority: int) -> SamplingSpec:
        """The request for the next turn."""
        settings = self._settings
        draw = self._plans.turn(draw, len(trace.turns))
        if settings.thinking_tokens is not None:
            left = max(1, settings.thinking_tokens - trace.thinking)
            draw = replace(draw, thinking_cut=min(draw.thinking_cut, left))
        spec = self._plans.spec(draw, priority)
        room = self._room(trace)
        return replace(spec, max_tokens=min(spec.max_tokens, room, settings.turn_tokens or room))

    def _room(self, trace: Trace) -> int:
        """Tokens that are left of the episode."""
        return trace.shared[0] + self._most_tokens - len(trace.context)

    async def _scored(self, prompt: Prompt, trace: Trace, draw: Draw) -> ScoredCompletion:
        parts = trace.parts(draw)
        completion = facts_of_parts(parts, trace.shared)
        sampled = completion.sampled_tokens
        total = float(sum(trace.rewards))
        if trace.failure:
            score = self._verifier.paid(False, prompt, tokens=sampled)
            score = replace(score, reason=f"environment_{trace.failure}")
        elif trace.truncated or not trace.rewards:
            if not trace.truncated:
                self._verified.add(prompt.prompt_id)
            score = await self._verifier.score(trace.text, prompt, truncated=trace.truncated, tokens=sampled)
        else:
            value = trace.rewards[-1]
            if not all(isinstance(reward, bool) for reward in trace.rewards):
                value = total
            score = self._verifier.paid(value, prompt, tokens=sampled)
        if trace.failure or trace.truncated:  # costs so far are not saved by breaking off
            score = replace(score, reward=min(score.reward, total))
        return ScoredCompletion(prompt=prompt, completion=completion, parts=tuple(map(write, parts)), score=score)


@contextlib.asynccontextmanager
async def sampling(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    plans: Plans,
    *,
    verifier: VerifierPool | TaskPools,
    logs: Path,
) -> AsyncIterator[Callable[[Plans], Sampler]]:
    """Makes samplers that share decoders and environments, whose processes run in the block.

    plans: of which all others differ in budgets alone. Raises as `DecoderPool` and `EnvironmentPool`.
    """
    async with contextlib.AsyncExitStack() as running:
        tools: Sequence[dict[str, Any]] = ()
        sampler: Callable[..., Sampler] = Sampler
        if recipe.environment.name is not None:
            environments = await running.enter_async_context(EnvironmentPool(recipe.environment, logs=logs))
            tools = environments.tools
            sampler = partial(EpisodeSampler, recipe, environments=environments)
        decoders = await running.enter_async_context(DecoderPool(recipe, tokenizer, plans, logs=logs, tools=tools))
        yield partial(sampler, decoders=decoders, verifier=verifier)

"""Episodes of several turns; each episode is one completion of a group.

    reset --messages--> render --ids--> generate --response--> step --messages--> render --> generate ... --> score

The life of an episode:

    reset      the environment's first messages become the prompt, which all episodes of the group share
    turn       the engine continues the ids so far; sampled ids never change afterwards
    step       the environment answers the response, in a separate process
    render     the new messages become ids (`prompts.turns`), which are appended; if the template rewrites earlier
               messages, the episode forks: a new part begins with the rewritten context, all masked
    end        the environment ends the episode; or a limit ends the episode, which then counts as truncated
    score      the environment's last bool reward, or the sum of numbers if a reward is a number; without any reward,
               the verifier's verdict on the last response

If the user's class has a method `run`, the class is an agent: `run` asks the policy for turns (`rollouts.agents`) and
returns the reward.

Each token that the policy sampled is in one part (`rollouts.trace`), once. An episode stays on the group's engine,
whose prefix cache has the episode's context as long as the weights stay the same.

A failure of the environment is no reward (`environments.pool`): the episode is lost, or begins anew if a fresh
environment answers equal responses differently. An `EpisodeEnd` says how an episode ended and whether the episode
gets a reward. A prompt is left out after OWN_FAILURES episodes in a row that failed by a fault of the prompt's row.
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

from megatron_scalerl.batching.rollout_bytes import facts_of_parts, write
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.environments.pool import EnvironmentFailed, EnvironmentPool, Episode
from megatron_scalerl.environments.response import Message, Response
from megatron_scalerl.processes.child_process import race
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.recipe.tasks import Task, tasks_of
from megatron_scalerl.rewards.pool import TaskPools, VerifierPool
from megatron_scalerl.rollouts.agents import AgentServer, AnswerCut, Ask, LimitReached
from megatron_scalerl.rollouts.decoder import Decoded, TurnSettings
from megatron_scalerl.rollouts.decoder_pool import DecoderPool, turn_settings
from megatron_scalerl.rollouts.plans import Draw, Plans
from megatron_scalerl.rollouts.sampler import Sampler, ScoredCompletion, TaskSamplers, unconfirmed_text
from megatron_scalerl.rollouts.trace import Part, Trace
from megatron_scalerl.types import ENDS, CompletionLost, Prompt

TRIES = 3
"""Number of tries of an episode whose environment, when replayed, answers equal responses differently."""
PROBLEM_CHARS = 500
"""Number of characters at the end of a failure's message that are stored with the score."""
OWN_FAILURES = 16
"""A prompt is left out of the run after this number of episodes in a row that a fault of the prompt's row has ended.

An outage does not count as a fault of the row.
"""


class EpisodeSampler(Sampler):
    """Runs the episodes of prompts on engines, and scores them."""

    def __init__(
        self,
        recipe: Recipe,
        plans: Plans,
        *,
        environments: EnvironmentPool,
        agents: AgentServer,
        talk: TurnSettings,
        **pools: Any,
    ):
        """recipe: the task's recipe. pools: the arguments decoders and verifier of `Sampler`."""
        super().__init__(plans, **pools)
        self._environments = environments
        self._talk = talk
        self._agents = agents
        self._settings = recipe.environment
        self._most_tokens = recipe.max_completion_tokens
        self._most_prompt_tokens = recipe.prompts.max_prompt_tokens
        self._problems: dict[str, str] = {}
        """Id of a prompt that cannot be learned from -> reason."""
        self._failures: Counter[str] = Counter()
        """Id of a prompt -> number of episodes in a row that a fault of the prompt's row has ended."""
        self._verified: set[str] = set()
        """Ids of prompts with an episode that the verifier has scored."""

    async def problem_of(self, prompt: Prompt) -> str:
        """The reason why a prompt cannot be learned from, known after the first episodes; else empty.

        A reason is that all episodes of the prompt fail, or that the verifier may reward no answer.
        """
        problem = self._problems.get(prompt.prompt_id, "")
        if problem or prompt.prompt_id not in self._verified:
            return problem
        return await super().problem_of(prompt)

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int, max_tokens: int | None = None
    ) -> ScoredCompletion:
        """A scored episode of a prompt; with `max_tokens` (for the probe), one scored turn without an environment.

        Raises as `Sampler.complete`; CompletionLost (`environment_REASON`) if the environment has failed, and
        RuntimeError if environments keep failing (`environments.pool`).
        """
        if max_tokens is not None:
            return await super().complete(engine, prompt, draw, priority=priority, max_tokens=max_tokens)
        for _ in range(TRIES):
            try:
                result = await self._episode(engine, prompt, draw, priority)
            except EnvironmentFailed as failure:
                end = failure.end
                lost = CompletionLost(str(failure), reason=f"environment_{end.reason}")
                if end.reason != "changed":
                    break
            else:
                del self._failures[prompt.prompt_id]
                return result
        if end.by == "row":
            self._failures[prompt.prompt_id] += 1
        if self._failures[prompt.prompt_id] >= OWN_FAILURES:
            self._problems[prompt.prompt_id] = str(lost)
        raise lost

    async def _episode(self, engine: EngineClient, prompt: Prompt, draw: Draw, priority: int) -> ScoredCompletion:
        """One try of an episode. Raises EnvironmentFailed if the episode is lost in this try."""
        async with self._environments.episode(prompt.row) as environment:
            messages: Sequence[Message] = ()
            if not self._environments.agent:
                messages, ids = await self._first(environment)
                prompt = replace(prompt, token_ids=tuple(ids.tolist()))
            trace = Trace(prompt.token_ids)
            trace.metrics = environment.metrics
            ask = partial(self._ask, engine, trace, draw, priority)
            problem = ""
            reason = "silent"
            explanation = "run returned without a request to the policy"
            try:
                async with asyncio.timeout(self._settings.episode_timeout_s):
                    if self._environments.agent:
                        await self._run(environment, trace, ask)
                    else:
                        await self._turns(environment, [messages], trace, ask)
            except LimitReached as limit:
                reason = "prompt"
                explanation = str(limit)
            except EnvironmentFailed as failure:
                if not failure.end.paid:
                    raise
                trace.end = failure.end
                problem = str(failure)
            except TimeoutError:
                reason = "time"
                explanation = (
                    f"no turn ended within {self._settings.episode_timeout_s:g} s (environment.episode_timeout_s)"
                )
            if not trace.turns:
                raise EnvironmentFailed(f"{self._environments.subject}: {explanation}", reason=reason)
        scored = await self._scored(prompt, trace, draw)
        return replace(scored, score=replace(scored.score, problem=problem[-PROBLEM_CHARS:]))

    async def _first(self, environment: Episode) -> tuple[Sequence[Message], np.ndarray]:
        """(the environment's first messages, the messages as token ids [P]).

        Raises EnvironmentFailed if reset fails, or if the messages have too many tokens or none.
        """
        messages = await environment.reset()
        ids, _ = await self._rendered([messages], [])
        if not 1 <= len(ids) <= self._most_prompt_tokens:
            raise EnvironmentFailed(
                f"the environment's first messages have {len(ids)} tokens; allowed are 1 to "
                f"prompts.max_prompt_tokens, {self._most_prompt_tokens}",
                reason="prompt",
            )
        return messages, ids

    async def _turns(self, environment: Episode, messages: list[Sequence[Message]], trace: Trace, ask: Ask) -> None:
        """Alternate between policy and environment until either ends the episode."""
        context = trace.prompt
        for turns_left in reversed(range(self._settings.max_turns)):
            part, _, decoded = await ask(context, number=len(trace.turns))
            turn = await environment.step(Response(text=decoded.text or "", tool_calls=decoded.tool_calls))
            trace.turn_rewards.append(float(turn.reward or 0))
            if turn.reward is not None:
                trace.rewards.append(turn.reward)
            if turn.done:
                trace.end = ENDS["done"]
            if turn.done or not turns_left:
                return
            messages.append(turn.messages)
            ids, rewritten = await self._rendered(messages, trace.turns)
            context = ids.tolist()
            if not rewritten:
                context = [*part.context, *context]

    async def _run(self, environment: Episode, trace: Trace, ask: Ask) -> None:
        """Run the agent, whose requests are answered until the agent returns or a limit ends the episode."""
        tokens = len(trace.prompt) + self._most_tokens
        limits = {"vocabulary": self._plans.vocabulary, "tokens": tokens}
        async with (
            self._agents.session(self._settings, ask, self._decoders, self._talk, **limits) as session,
            race(environment.run(session), asyncio.shield(session.over)) as (run, _),
        ):
            outcome = session.over if session.over.done() else run
            problem = outcome.exception()
            if session.unasked and isinstance(problem, LimitReached | None):
                subject = self._environments.subject
                raise EnvironmentFailed(f"{subject}: a new try of run did not repeat all requests", reason="changed")
            reward = outcome.result()
        trace.end = ENDS["done"]
        if reward is not None:
            trace.rewards.append(reward)

    async def _rendered(
        self, messages: Sequence[Sequence[Message]], turns: Sequence[PastTurn]
    ) -> tuple[np.ndarray, bool]:
        """Render as `DecoderPool.render`. Raises EnvironmentFailed for messages that the chat template refuses."""
        try:
            return await self._decoders.render(messages, turns, self._talk)
        except ValueError as problem:
            raise EnvironmentFailed(str(problem), reason="template") from None

    async def _ask(
        self,
        engine: EngineClient,
        trace: Trace,
        draw: Draw,
        priority: int,
        context: list[int],
        *,
        number: int,
        max_tokens: int | None = None,
        tools: str | None = None,
        stop: tuple[str, ...] = (),
    ) -> tuple[Part, PastTurn, Decoded]:
        """Sample the policy's turn after a context [N]; returns (part of the episode, turn, decoded completion).

        number: number of the turn, from 0. max_tokens: the agent's limit of the turn. tools: JSON; None for the
        environment's tools. stop: stop strings. Raises LimitReached if a limit of tokens ends the episode, and
        EnvironmentFailed if context and prompt begin with different tokens.
        """
        room = len(trace.prompt) + self._most_tokens - len(context)
        if room <= 0:
            raise LimitReached(f"a context of {len(context)} tokens leaves no room in environment.episode_tokens")
        if not trace.begins(context):
            raise EnvironmentFailed(
                "prompts.chat_template: a conversation does not begin with the first token of the episode's prompt",
                reason="template",
            )
        spec = self._spec(trace, self._plans.turn(draw, number), priority)
        budgets = (spec.max_tokens, room, self._settings.turn_tokens, max_tokens)
        spec = replace(spec, max_tokens=min(filter(None, budgets)), stop=stop)
        with trace.turn(context) as part:
            talk = self._talk
            if tools is not None:
                talk = replace(talk, tools=tools)
            decoded = await engine.generate(context, sampling=spec, decoder=self._decoders.of_turns(talk))
            turn = trace.add(part, context, decoded)
        if decoded.completion.truncated:
            if max_tokens and len(turn.token_ids) >= max_tokens:
                raise AnswerCut(f"an answer reached max_tokens of the request, {max_tokens}")
            raise LimitReached("a turn reached a limit of tokens, such as environment.turn_tokens")
        return part, turn, decoded

    def _spec(self, trace: Trace, draw: Draw, priority: int) -> SamplingSpec:
        """The sampling settings of the next turn. `_ask` lowers `max_tokens` to the episode's limits."""
        settings = self._settings
        if settings.thinking_tokens is not None:
            thinking_left = max(1, settings.thinking_tokens - trace.thinking)
            draw = replace(draw, thinking_cut=min(draw.thinking_cut, thinking_left))
        return self._plans.spec(draw, priority)

    async def _scored(self, prompt: Prompt, trace: Trace, draw: Draw) -> ScoredCompletion:
        parts = trace.parts(draw)
        completion = replace(facts_of_parts(parts, trace.shared), turns=len(trace.turns))
        sampled = completion.sampled_tokens
        total = float(sum(trace.rewards))
        truncated = trace.end.by == "limit"
        if trace.end.by == "class":
            score = self._verifier.paid(False, prompt, tokens=sampled)
            score = replace(score, reason=f"environment_{trace.end.reason}")
        elif truncated or not trace.rewards:
            if not truncated:
                self._verified.add(prompt.prompt_id)
            score = await self._verifier.score(trace.text, prompt, truncated=truncated, tokens=sampled)
        else:
            value = trace.rewards[-1]
            if not all(isinstance(reward, bool) for reward in trace.rewards):
                value = total
            score = self._verifier.paid(value, prompt, tokens=sampled)
        # Unless the environment ended the episode, the score is at most the sum of all rewards: a policy must not
        # escape negative rewards by breaking off the episode.
        if trace.end.by != "environment":
            score = replace(score, reward=min(score.reward, total))
        return ScoredCompletion(
            prompt=prompt,
            completion=completion,
            parts=tuple(map(write, parts)),
            score=replace(score, metrics=trace.metrics, turn_rewards=tuple(trace.turn_rewards)),
            unconfirmed_text=unconfirmed_text(score, trace.text),
        )


@contextlib.asynccontextmanager
async def sampling(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    verifier: VerifierPool | TaskPools,
    logs: Path,
) -> AsyncIterator[Callable[[Recipe], Sampler]]:
    """Context with a function (recipe) -> sampler; all samplers share the processes of decoders and environments.

    The processes run until the block ends. The function's argument may differ from `recipe` only in token budgets.
    Raises as `DecoderPool`, `EnvironmentPool` and `turn_settings`.
    """
    async with contextlib.AsyncExitStack() as resources:
        pools: dict[EnvironmentSection, EnvironmentPool] = {}
        episodes: dict[str, dict[str, Any]] = {}
        agents = AgentServer()
        for task in tasks_of(recipe):
            section = task.recipe.environment
            if section.name is None:
                continue
            if section not in pools:
                pool = EnvironmentPool(section, logs=logs, name="_".join(filter(None, ("environment", task.name))))
                pools[section] = await resources.enter_async_context(pool)
            talk = turn_settings(task.recipe, tokenizer, pools[section].tools)
            episodes[task.name] = {"environments": pools[section], "agents": agents, "talk": talk}
        if any(pool.agent for pool in pools.values()):
            await resources.enter_async_context(agents)
        plans = Plans(recipe, tokenizer)
        decoders = await resources.enter_async_context(DecoderPool(recipe, tokenizer, plans, logs=logs))

        def sampler_of(task: Task) -> Sampler:
            plans = Plans(task.recipe, tokenizer)
            if task.name not in episodes:
                return Sampler(plans, decoders=decoders, verifier=verifier)
            components = episodes[task.name]
            return EpisodeSampler(task.recipe, plans, **components, decoders=decoders, verifier=verifier)

        yield lambda recipe: TaskSamplers({task.name: sampler_of(task) for task in tasks_of(recipe)})

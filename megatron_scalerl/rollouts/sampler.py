"""Makes scored completions: an engine generates, a decoder process decodes, and the verifier scores.

Training and validation use the same sampler, so that completions of both differ only in seeds and priority.
"""

from collections.abc import Mapping
from dataclasses import replace

from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.record import record
from megatron_scalerl.rewards.pool import TaskPools, VerifierPool
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.plans import Draw, Plans
from megatron_scalerl.types import Completion, Prompt, Score


@record
class ScoredCompletion:
    """A completion with a score. Produced by `Sampler.complete`."""

    prompt: Prompt
    """The prompt, with the token ids from which the engine generated."""
    completion: Completion
    parts: tuple[bytes, ...]
    """The single sample, or the parts of a forked episode, in the format of `batching.rollout_bytes.write`."""
    score: Score
    unconfirmed_text: str = ""
    """The answer, if the verifier accepts and the second judge (`validation.audit`) does not confirm; else empty."""


class Sampler:
    """Completes prompts on engines and scores the completions."""

    def __init__(self, plans: Plans, *, decoders: DecoderPool, verifier: VerifierPool | TaskPools):
        self._plans = plans
        self._decoders = decoders
        self._verifier = verifier

    def draw(self, prompt: Prompt, seed: int, group_id: int, index: int) -> Draw:
        """The random choices for completion `index` of a group, which depend only on the arguments."""
        return self._plans.draw(seed, group_id, index)

    async def problem_of(self, prompt: Prompt) -> str:
        """The reason why a prompt cannot be learned from, else empty (`VerifierPool.problem_of`)."""
        return await self._verifier.problem_of(prompt)

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int, max_tokens: int | None = None
    ) -> ScoredCompletion:
        """A new, scored completion of a prompt. max_tokens: a limit below the run's budget.

        Raises CompletionLost for a completion that is unusable through no fault of the policy, and EngineError if the
        caller has to evict the engine. Raises RuntimeError, which ends the run, if the pool of decoders or verifiers
        has ended.
        """
        spec = self._plans.spec(draw, priority)
        if max_tokens is not None:
            spec = replace(spec, max_tokens=min(max_tokens, spec.max_tokens))
        decoded = await engine.generate(prompt.token_ids, sampling=spec, decoder=self._decoders)
        completion = decoded.completion
        score = await self._verifier.score(
            decoded.text, prompt, truncated=completion.truncated, tokens=completion.sampled_tokens
        )
        return ScoredCompletion(
            prompt=prompt,
            completion=completion,
            parts=(decoded.data,),
            score=score,
            unconfirmed_text=unconfirmed_text(score, decoded.text),
        )


class TaskSamplers(Sampler):
    """Completes each prompt with the sampler of the prompt's task."""

    def __init__(self, samplers: Mapping[str, Sampler]):
        """samplers: name of a task -> sampler."""
        self._samplers = samplers

    def draw(self, prompt: Prompt, seed: int, group_id: int, index: int) -> Draw:
        """As `Sampler.draw`, with the sampler of the prompt's task."""
        return self._samplers[prompt.task].draw(prompt, seed, group_id, index)

    async def problem_of(self, prompt: Prompt) -> str:
        """As `Sampler.problem_of`, with the sampler of the prompt's task."""
        return await self._samplers[prompt.task].problem_of(prompt)

    async def complete(
        self, engine: EngineClient, prompt: Prompt, draw: Draw, *, priority: int, max_tokens: int | None = None
    ) -> ScoredCompletion:
        """As `Sampler.complete`, with the sampler of the prompt's task."""
        sampler = self._samplers[prompt.task]
        return await sampler.complete(engine, prompt, draw, priority=priority, max_tokens=max_tokens)


def unconfirmed_text(score: Score, text: str | None) -> str:
    """The text of an answer that the verifier accepts and the second judge does not confirm; else empty."""
    return text or "" if score.confirmed is False else ""

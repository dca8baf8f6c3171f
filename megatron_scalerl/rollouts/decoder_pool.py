"""Decodes the responses of engines in processes, so that the controller handles only facts and opaque bytes.

    generate --slots--> decode() --> processes.worker_pool --one body at a time--> process --> Decoded

Bound: a response's body is read only with one of `SLOTS * workers` slots, which the body keeps until the end of
decoding. So this process holds at most `SLOTS * workers` bodies, and each decoder process holds one. A body without a
slot stays in the buffer of the socket (128 KiB) and in the engine's server. At the end of `async with`, outstanding
requests fail.

The life of a body: `slot` admits the body, `EngineClient.generate` reads the body, `decode` sends the body to a
process; then the slot is free. A process that dies or does not answer within TIMEOUT_S is replaced
(`processes.worker_pool`), and the body is decoded again.

A body is lost (CompletionLost, `decoder_lost`) if two processes ended with this body, or if no process starts for the
body. The run ends (RuntimeError) if MAX_LOST_IN_A_ROW bodies in a row are lost, or if no process starts any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_scalerl.engine.answers import EngineError
from megatron_scalerl.engine.client import Decoder
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.environments.response import Message
from megatron_scalerl.processes.worker_pool import Program, WorkerDied, WorkerPool
from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rewards.pool import default_workers
from megatron_scalerl.rollouts.decoder import Decoded, Reply, Request, Setup, TurnSettings, turns_of
from megatron_scalerl.rollouts.plans import Plans
from megatron_scalerl.types import CompletionLost

logger = logging.getLogger(__name__)

SLOTS = 4
"""Number of response bodies in the controller's memory, per decoder process."""
TIMEOUT_S = 60.0
"""Time limit to decode one response body (s). A body of 14,000 tokens takes 10 ms."""
MAX_LOST_IN_A_ROW = 16
START_TIMEOUT_S = 300.0
MAX_DEFAULT_WORKERS = 4
"""Largest number of decoder processes if the recipe sets no number. A process decodes over a million tokens a
second."""


class DecoderPool:
    """The decoder processes of a run, used as `decoder` by `EngineClient.generate`; `async with` starts the pool."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        plans: Plans,
        *,
        logs: Path,
        timeout_s: float = TIMEOUT_S,
    ):
        """logs: folder of the processes' logs, `decoder-N.log`."""
        fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        # With the text of tokenizer.json the processes need no transformers, whose import takes seconds.
        text = fast.to_str() if hasattr(fast, "to_str") else None
        setup = Setup(
            answer=plans.answer_format(), tokenizer=text, policy=recipe.policy.path, episodes=recipe.episodes
        )
        workers = recipe.rollouts.decoders or min(MAX_DEFAULT_WORKERS, default_workers())
        program = Program(
            name="decoder",
            module="megatron_scalerl.rollouts.decoder",
            setup=msgspec.json.encode(setup),
            # A process decodes one body at a time, so it needs no threads.
            environment=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            subject="rollouts.decoders",
            timeout_s=timeout_s,
            start_timeout_s=START_TIMEOUT_S,
            logs=logs,
        )
        self._workers = WorkerPool(program, workers, Reply, settles=_warn)
        self._slots = asyncio.Semaphore(SLOTS * workers)
        self._lost_in_a_row = 0

    async def __aenter__(self) -> DecoderPool:
        """Start all processes. Raises ProcessDied or OSError if a process does not start."""
        await self._workers.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._workers.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that are running."""
        return self._workers.pids

    def slot(self) -> AbstractAsyncContextManager[None]:
        """A context in which the caller may read and decode one body; waits while all slots are in use."""
        return self._slots

    def of_turns(self, talk: TurnSettings) -> Decoder[Decoded]:
        """The argument `decoder` of `EngineClient.generate` for a turn of an episode with the settings `talk`."""
        return SimpleNamespace(slot=self.slot, decode=partial(self.decode, talk=talk))  # type: ignore[return-value]

    async def decode(
        self, body: bytes, *, plan: Plan | None, seed: int, where: str, talk: TurnSettings | None = None
    ) -> tuple[Decoded, int]:
        """(completion in the response to a generation request, number of tokens of the completion).

        The caller holds a slot. plan, seed: from the request. where: engine and path, for errors. talk: the settings
        of an episode's turns. Raises EngineError for a malformed response, CompletionLost if a token has no
        log-probability (`no_logprobs`) or the body ended two processes (`decoder_lost`), RuntimeError if the pool
        ended.
        """
        problem = f"{where}: the response of {len(body)} bytes cannot be decoded"
        request = Request(plan=plan, seed=seed, where=where, talk=talk)
        reply, data = await self._ask(request, body, problem)
        if reply.decoded is not None:
            return replace(reply.decoded, data=data), reply.decoded.completion.tokens
        if reply.error:
            raise EngineError(reply.error)
        raise CompletionLost(reply.lost, reason=reply.lost_reason)

    async def render(
        self, messages: Sequence[Sequence[Message]], turns: Sequence[PastTurn], talk: TurnSettings
    ) -> tuple[np.ndarray, bool]:
        """Render new messages: (token ids; True if the ids replace the context, False if the ids extend the context).

        messages: [turns + 1] the environment's messages before each turn; the last messages are new. Raises
        ValueError as `prompts.turns.TurnRenderer`, CompletionLost and RuntimeError as `decode`.
        """
        request = Request(messages=tuple(map(tuple, messages)), turns=tuple(turns), talk=talk)
        reply, data = await self._ask(request, b"", "the environment's messages cannot be rendered")
        if reply.error:
            raise ValueError(reply.error)
        return np.frombuffer(data, dtype="<u4"), reply.rewritten

    async def _ask(self, request: Request, body: bytes, problem: str) -> tuple[Reply, bytes]:
        """(reply to a request, bytes behind the reply). problem: the error's text if the request ends processes."""
        try:
            answer = await self._workers.ask(msgspec.json.encode(request), body)
        except WorkerDied as death:
            raise self._lost(f"{problem}: {death}") from None
        self._lost_in_a_row = 0
        return answer

    def _lost(self, problem: str) -> Exception:
        """The error for a request that ended processes; the pool ends after MAX_LOST_IN_A_ROW requests in a row."""
        self._lost_in_a_row += 1
        if self._lost_in_a_row < MAX_LOST_IN_A_ROW:
            return CompletionLost(problem, reason="decoder_lost")
        end = RuntimeError(f"{problem}, {self._lost_in_a_row} times in a row")
        self._workers.end(end)
        return end


def turn_settings(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
) -> TurnSettings:
    """The settings of turns for a task with an environment. recipe: the task's recipe.

    Raises ValueError if the tokenizer's chat template supports no turns, or not these tools.
    """
    talk = TurnSettings(
        prompts=recipe.prompts.model_dump_json(),
        end_ids=end_token_ids(recipe.policy.path, tokenizer),
        thinking=recipe.environment.thinking,
        tools=msgspec.json.encode(tools).decode(),
    )
    turns_of(tokenizer, talk)
    return talk


def _warn(death: WorkerDied) -> bool:
    """Log the end of a decoder process; returns False, so that the request is repeated."""
    logger.warning("a decoder process did not answer, and is replaced: %s", death)
    return False

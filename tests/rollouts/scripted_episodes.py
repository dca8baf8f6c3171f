"""Episodes of the tests: real decoders, environments and verifier, and an engine with a script.

A decoder process of episodes imports transformers, which takes seconds: episodes with the same settings share one, on
an event loop that goes on between them.
"""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fakes.scripted_engine import StandInScriptedEngine
from recipe_files import small_recipe

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, facts_of, write
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.decoder_pool import Decoded, DecoderPool
from megatron_scalerl.rollouts.episodes import sampling
from megatron_scalerl.tiny.tokenizer import build_tokenizer
from megatron_scalerl.types import CompletionLost, Prompt, Score

TOKENIZER = build_tokenizer()
QUESTION = "7;+2;-7="
RIGHT = Score(correct=True, reward=1.0)
LOOP = asyncio.Runner()
FOLDER = tempfile.TemporaryDirectory()
POOLS = {}
"""Setup of a decoder -> processes that were started with it."""


class SharedDecoders(DecoderPool):
    """Decoders that are started once, and go on until `close`."""

    async def __aenter__(self):
        setup = self._workers._program.setup
        if setup not in POOLS:
            await self._workers.start()
            POOLS[setup] = self._workers
        self._workers = POOLS[setup]
        return self

    async def __aexit__(self, *exception):
        """They outlive the episode."""


def close():
    """End the decoders, as `conftest` does after each file."""
    while POOLS:
        LOOP.run(POOLS.popitem()[1].close())


def wrong(reason=""):
    return Score(correct=False, reward=-1.0, reason=reason)


def ids(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def prompt(**extra):
    return Prompt(prompt_id="p", text=QUESTION, answer="2", token_ids=(1,), extra=extra)


def said(text, *, versions=((3, None),), **changes):
    """A turn of the script. versions: (version, tokens) spans; None: the rest."""
    token_ids = ids(text)
    spans = []
    start = 0
    for version, tokens in versions:
        end = len(token_ids) if tokens is None else start + tokens
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    logprobs = [-0.125 * (1 + i % 4) for i in range(len(token_ids))]
    return {"token_ids": token_ids, "logprobs": logprobs, "weight_versions": spans} | changes


def episodes_recipe(folder, kind, **sections):
    """The recipe of `completed`."""
    return small_recipe(
        **{
            "policy": {"path": str(folder)},
            "rollouts": {"decoders": 1},
            "environment": {"name": f"episode_environments:{kind}", "workers": 1, "max_turns": 4},
            "interruption": {"enabled": True, "thinking_tokens": [2, 2], "answer_tokens": 20},
            "rewards": {"workers": 1},
        }
        | sections
    )


def save_tokenizer(folder):
    TOKENIZER.save_pretrained(folder)
    (Path(folder) / "config.json").write_text("{}")


@contextlib.asynccontextmanager
async def sampler_of(recipe, tokenizer=TOKENIZER):
    """A sampler with its processes."""
    folder = Path(recipe.policy.path)
    if tokenizer is TOKENIZER:
        save_tokenizer(folder)
    async with (
        VerifierPool(recipe.rewards) as verifier,
        sampling(recipe, tokenizer, verifier=verifier, logs=folder) as samplers,
    ):
        yield samplers(recipe)


async def outcome(sampler, engine, row, sample=0):
    """What the sampler returns or raises."""
    try:
        return await sampler.complete(engine, row, sampler.draw(row, 1, 0, sample), priority=1)
    except CompletionLost as lost:
        return lost


def completed(folder, kind, *script, row=None, wait=None, tokenizer=TOKENIZER, **sections):
    """(what the sampler returns or raises, the engine, why the prompt is left out) of one episode."""
    engine = StandInScriptedEngine(*script, wait=wait)
    policy = folder
    if tokenizer is TOKENIZER:
        save_tokenizer(folder)
        policy = FOLDER.name

    async def main():
        async with sampler_of(episodes_recipe(policy, kind, **sections), tokenizer) as sampler:
            result = await outcome(sampler, engine, row or prompt())
            return result, engine, await sampler.problem_of(row or prompt())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_scalerl.rollouts.episodes.DecoderPool", SharedDecoders)
        return LOOP.run(main())


THREE = (
    said("</think>7+2-7=<eos>"),
    said(
        "7;Okay, time is up. Let me stop thinking and formulate a final answer now. </think>7+2=<eos>",
        versions=((3, 4), (4, None)),
    ),
    said("</think>2<eos>", versions=((4, None),)),
)


def arrays(text, answer_start):
    """A turn of the policy."""
    token_ids = np.array(ids(text), "<u4")
    size = len(token_ids)
    turn = RolloutArrays(
        token_ids=token_ids,
        rollout_logprobs=np.full(size, -0.5, "<f4"),
        policy_versions=np.full(size, 3),
        loss_mask=np.ones(size, bool),
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )
    return Decoded(completion=facts_of(turn), data=write(turn), text="", answer_start=answer_start)

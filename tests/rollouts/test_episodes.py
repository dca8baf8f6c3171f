"""Episodes token by token: real decoders and environments, a verifier in processes, and an engine with a script."""

import asyncio
import contextlib

import pytest
from fakes.scripted_engine import StandInScriptedEngine
from recipe_files import small_recipe

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.episodes import sampling
from megatron_scalerl.rollouts.plans import Plans
from megatron_scalerl.tiny.tokenizer import build_tokenizer
from megatron_scalerl.types import CompletionLost, Prompt, Score

TOKENIZER = build_tokenizer()
QUESTION = "7;+2;-7="


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


def completed(folder, environment, *script, row=None, wait=None, **sections):
    """(what the sampler returns or raises, the engine, the sampler) of one episode."""
    recipe = small_recipe(
        **{
            "policy": {"path": str(folder)},
            "environment": {"name": f"episode_environments:{environment}", "workers": 1, "max_turns": 4},
            "interruption": {"enabled": True, "thinking_tokens": [2, 2], "answer_tokens": 20},
            "rewards": {"workers": 1},
        }
        | sections
    )
    engine = StandInScriptedEngine(*script, wait=wait)
    TOKENIZER.save_pretrained(folder)
    (folder / "config.json").write_text("{}")

    async def main():
        plans = Plans(recipe, TOKENIZER)
        async with contextlib.AsyncExitStack() as running:
            verifier = await running.enter_async_context(VerifierPool(recipe.rewards))
            pools = sampling(recipe, TOKENIZER, plans, verifier=verifier, logs=folder)
            sampler = (await running.enter_async_context(pools))(plans)
            draw = sampler.draw(1, 0, 0)
            try:
                result = await sampler.complete(engine, row or prompt(), draw, priority=1)
            except CompletionLost as lost:
                result = lost
            return result, engine, await sampler.problem_of(row or prompt())

    return asyncio.run(main())


THREE = (
    said("</think>7+2-7=<eos>"),
    said(
        "7;Okay, time is up. Let me stop thinking and formulate a final answer now. </think>7+2=<eos>",
        versions=((3, 4), (4, None)),
    ),
    said("</think>2<eos>", versions=((4, None),)),
)


@pytest.mark.slow
def test_an_episode_of_three_turns_equals_the_hand(tmp_path, monkeypatch):
    """Two calls of a tool and a forced end of thinking: [tokens, their origin, version, log-prob] by hand."""
    monkeypatch.syspath_prepend("tests/rollouts")
    result, engine, _ = completed(tmp_path, "Said", *THREE, row=prompt(messages=["2", "9"]))
    first = (1, 13, 20, 16, 8, 20, 17, 13, 19, 3)
    turns = ((4, 13, 16, 8, 17, 13, 19, 2), (13, 20, 5, 4, 13, 16, 8, 19, 2), (4, 8, 2))
    between = ((8, 3), (15, 3))
    assert result.prompt == prompt(messages=["2", "9"]).__class__(
        prompt_id="p", text=QUESTION, answer="2", token_ids=first, extra={"messages": ["2", "9"]}
    )
    rollout = rollout_of(read(result.parts[0]))
    assert rollout.token_ids == (*turns[0], *between[0], *turns[1], *between[1], *turns[2])
    assert rollout.loss_mask == (
        *(True,) * 8, *(False,) * 2, True, True, False, False, *(True,) * 5, *(False,) * 2, *(True,) * 3
    )  # fmt: skip
    assert rollout.environment == ((8, 10), (19, 21))
    assert rollout.policy_versions == (3,) * 14 + (4,) * 10
    steps = (-0.125, -0.25, -0.375, -0.5)
    assert rollout.rollout_logprobs == (
        *steps, *steps, 0.0, 0.0, *steps[:2], 0.0, 0.0, *steps, -0.125, 0.0, 0.0, *steps[:3]
    )  # fmt: skip
    assert (rollout.interrupted, rollout.truncated) == (True, False)
    assert [context for context, _ in engine.asked] == [
        first,
        (*first, *turns[0], *between[0]),
        (*first, *turns[0], *between[0], *turns[1], *between[1]),
    ]
    facts = result.completion
    assert (facts.tokens, facts.sampled_tokens, facts.environment_tokens, facts.turns) == (24, 18, 4, 3)
    assert (facts.first_version, facts.last_version, facts.parts) == (3, 4, ())
    assert facts.logprob_sum == -1.25 * 2 - 0.375 - 1.25 - 0.125 - 0.75
    assert result.score == Score(correct=True, reward=1.0)
    # each turn has a seed and a cut of its own, and the room that is left of 22 tokens
    assert len({spec.seed for _, spec in engine.asked}) == 3
    assert [spec.max_tokens for _, spec in engine.asked] == [22, 12, 1]

"""Episodes on a real engine with a prefix cache: real decoders, environments and verifier, and weight updates."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
import talking_policies
import tiny_policies
import torch
from engine_recipes import cache_hits, recipe_for, served
from sender_process import SenderProcess
from tiny_policies import error_of
from turn_policies import ids_of

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.prompts.tokenizer import load_tokenizer
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.episodes import sampling
from megatron_scalerl.rollouts.plans import TRAINING_PRIORITY
from megatron_scalerl.types import Prompt

pytestmark = pytest.mark.slow

BLOCK = 32
"""Tokens of a block of the prefix cache."""
TOLERANCE = 2e-5
USER = "Is that all? Think again."
TOOL = {"role": "tool", "content": "42"}


def talking(folder, **sections):
    """A recipe with an environment for a talking policy."""
    defaults = {
        "prompts": {"chat_template": True},
        "environment": {"name": "episode_worlds:Said", "workers": 1, "max_turns": 8, "episode_tokens": 1700},
        "interruption": {"thinking_tokens": [60, 90], "answer_tokens": 150, "phrase": "Time. "},
        "rollouts": {"decoders": 1},
        "rewards": {"workers": 1},
    }
    vllm = {"block_size": BLOCK, "disable_log_stats": False}
    both = defaults | sections
    return recipe_for(folder, vllm=vllm, **{name: defaults.get(name, {}) | both[name] for name in both})


def question(*messages):
    return Prompt(prompt_id="p", text="7+2-7", answer="2", token_ids=(), extra={"messages": list(messages)})


class Talks:
    """The engine, and what episodes ask of it. `before` and `within` run before and within a turn."""

    def __init__(self, process, folders):
        self.client = process.client
        self.models = [tiny_policies.load(folder) for folder in folders]
        self.tokenizer = load_tokenizer(folders[0])
        self.turns = []
        """(context, arrays of what the engine sampled and forced) of every turn of the last episode."""
        self.cuts = []
        """The thinking after which each of them is cut."""
        self.before = {}
        self.within = {}

    async def episode(self, sampler, prompt):
        """(what the sampler returns, its parts as rollouts)."""
        self.turns = []
        self.cuts = []
        result = await sampler.complete(self, prompt, sampler.draw(prompt, 7, 0, 0), priority=TRAINING_PRIORITY)
        return result, [rollout_of(read(data)) for data in result.parts]

    async def generate(self, context, *, sampling, decoder):
        """As the engine's client."""
        number = len(self.turns)
        if number in self.before:
            await self.before[number]()
        self.cuts.append(sampling.interruption.cut)
        turn = asyncio.create_task(self.client.generate(context, sampling=sampling, decoder=decoder))
        if number in self.within:
            await self.within[number]()
        decoded = await turn
        self.turns.append((list(context), read(decoded.data)))
        return decoded


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("talking")
    return [talking_policies.make(root / str(seed), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def talks(run, folders, tmp_path_factory):
    """A server of the first policy, whose prefix cache is on as the recipe's environment says."""
    with served(run, talking(folders[0]), tmp_path_factory.mktemp("talks") / "engine.log") as process:
        yield Talks(process, folders)


@pytest.fixture(scope="module")
def samplers(run, folders, talks, tmp_path_factory):
    """samplers(thinking, **sections): a sampler of episodes; all with the same thinking share their processes."""
    running = contextlib.AsyncExitStack()
    verifier = run(running.enter_async_context(VerifierPool(talking(folders[0]).rewards)))
    pools = {}

    def sampler(thinking="keep", *, environment=(), **sections):
        environment = {"thinking": thinking} | dict(environment)
        recipe = talking(folders[0], environment=environment, **sections)
        if thinking not in pools:
            logs = tmp_path_factory.mktemp(thinking)
            shared = sampling(recipe, talks.tokenizer, verifier=verifier, logs=logs)
            pools[thinking] = run(running.enter_async_context(shared))
        return pools[thinking](recipe)

    yield sampler
    run(running.aclose())


def cached_tokens(turns):
    """Tokens of the full blocks that a turn shares with the turn before and what was said in it."""
    known = [len(context) + len(arrays.token_ids) - 1 for context, arrays in turns[:-1]]  # the last is in no cache
    return sum(tokens // BLOCK * BLOCK for tokens in known)


def sampled(parts):
    """[(token, log-prob)] of the sampled tokens of rollouts, or of arrays, one after another."""
    return [
        (int(token), float(logprob))
        for part in parts
        for token, logprob, mask in zip(part.token_ids, part.rollout_logprobs, part.loss_mask)
        if mask
    ]


def test_an_episode_is_one_text_to_the_trainer_and_its_turns_hit_the_cache(talks, samplers, run):
    sampler = samplers()

    async def scenario():
        before = await cache_hits(talks.client)
        result, [rollout] = await talks.episode(sampler, question(USER, TOOL))
        return result, rollout, await cache_hits(talks.client) - before

    result, rollout, hits = run(scenario())
    prompt, turns = list(result.prompt.token_ids), talks.turns
    assert len(turns) == 3 and not rollout.truncated
    assert [context for context, _ in turns] == [
        [*prompt, *rollout.token_ids[:start]] for start in (0, *(end for _, end in rollout.environment))
    ]
    assert sampled([rollout]) == sampled(arrays for _, arrays in turns) and len(sampled([rollout])) > 150
    assert error_of(talks.models[0], prompt, rollout) <= TOLERANCE
    assert hits == cached_tokens(turns) > 300


def test_each_part_of_a_forked_episode_is_a_text_to_the_trainer(talks, samplers, run):
    """Two turns around a tool, a question at which the template drops their thinking, and two turns more."""
    result, parts = run(talks.episode(samplers("strip"), question(TOOL, USER, TOOL)))
    assert len(talks.turns) == 4 and len(parts) == len(result.completion.parts) == 2
    assert sampled(parts) == sampled(arrays for _, arrays in talks.turns), "each is in one part, once"
    for rollout, part in zip(parts, result.completion.parts):
        assert part.sampled_tokens == sum(rollout.loss_mask) > 100
        prompt = result.prompt.token_ids[: part.prompt_tokens]
        assert error_of(talks.models[0], prompt, rollout) <= TOLERANCE
    # the second part begins with another text than the one that the policy has written
    context = [*result.prompt.token_ids[: result.completion.parts[1].prompt_tokens], *parts[1].token_ids]
    assert context[: len(talks.turns[2][0])] == talks.turns[2][0]
    before = [*talks.turns[1][0], *talks.turns[1][1].token_ids.tolist()]
    assert len(talks.turns[2][0]) < len(before) and talks.turns[2][0] != before[: len(talks.turns[2][0])]


@torch.no_grad()
def replay_error(models, context, arrays):
    """Largest error of a turn against the models of its versions, on the schedule of its labels.

    Its context is computed with the weights of its first token. What weights of one version have computed, those of
    the next one go on with.
    """
    ids = torch.tensor([[*context, *arrays.token_ids.tolist()]])
    versions = arrays.policy_versions.tolist()
    ends = [
        (label, len(context) + versions.index(label) + versions.count(label) - 1) for label in sorted({*versions})
    ]
    keys, done, rows = None, 0, []
    for version, end in ends:
        output = models[version](ids[:, done:end], past_key_values=keys, use_cache=True)
        rows.append(output.logits[0])
        keys, done = output.past_key_values, end
    replayed = torch.cat(rows)[len(context) - 1 :].log_softmax(-1).gather(1, ids[0, len(context) :, None])[:, 0]
    return np.abs(replayed.numpy() - arrays.rollout_logprobs)[arrays.loss_mask].max()


async def updated_episode(talks, sampler, sender, folders, first, tries=3):
    """(tokens of the second turn before the update within it, prefix cache hits, {version: model}, rollout).

    The episode begins with version `first`; the next one comes between its first two turns, then one within the
    second. Where that turn has ended before, another episode follows.
    """
    client = talks.client
    sync = WeightSync(sender, Membership.of([client]), talking(folders[0], rollouts={"kv_cache": "keep"}))
    progress = []

    async def publish(number):
        sender.folder = folders[number]
        await sync.publish(first + number)

    async def between():
        await publish(1)
        progress.append(await client.progress())

    async def within():
        while (await client.progress()).tokens < progress[0].tokens + 20:
            await asyncio.sleep(0.01)
        await client.pause(clear_cache=False)
        progress.append(await client.progress())
        await publish(2)

    await publish(0)
    before = await cache_hits(talks.client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talks, "before", {1: between})
        patch.setattr(talks, "within", {1: within})
        _, [rollout] = await talks.episode(sampler, question(USER, TOOL))
    begin, update = progress
    if not update.cores[0].decoding:
        assert tries > 1, "the turn has ended"
        return await updated_episode(talks, sampler, sender, folders, first + 3, tries - 1)
    models = dict(enumerate(talks.models, first))
    return update.tokens - begin.tokens, await cache_hits(talks.client) - before, models, rollout


def test_weight_updates_between_two_turns_and_within_one(talks, samplers, folders, run):
    sampler = samplers(interruption={"thinking_tokens": [250, 270]})

    async def scenario():
        async with SenderProcess(folders[0]) as sender:
            found = await updated_episode(talks, sampler, sender, folders, 10)
            sync = WeightSync(sender, Membership.of([talks.client]), talking(folders[0]))
            sender.folder = folders[0]
            await sync.publish(200)
        return found

    switch, hits, models, rollout = run(scenario())
    turns = talks.turns
    first, second, third = models
    sizes = [len(arrays.token_ids) for _, arrays in turns]
    expected = [[first] * sizes[0], [second] * switch + [third] * (sizes[1] - switch), [third] * sizes[2]]
    assert 0 < switch < sizes[1]
    assert [arrays.policy_versions.tolist() for _, arrays in turns] == expected
    labels = [version for turn in expected for version in turn]
    spoken = [
        not any(start <= at < end for start, end in rollout.environment) for at in range(len(rollout.token_ids))
    ]
    assert [version for version, said in zip(rollout.policy_versions, spoken) if said] == labels
    assert max(replay_error(models, *turn) for turn in turns) <= TOLERANCE
    assert hits == 0, "each turn begins with a version of its own"


def test_thinking_of_all_turns_has_one_budget(talks, samplers, run):
    budget = 100
    sampler = samplers(environment={"thinking_tokens": budget})
    phrase = ids_of(talks.tokenizer, "Time. </think>")
    result, [rollout] = run(talks.episode(sampler, question(TOOL, USER, TOOL)))
    cuts = talks.cuts
    assert 60 <= cuts[0] <= 90 and cuts[2:] == [1, 1]
    assert cuts[1] == budget - cuts[0] - len(phrase)
    for cut, (_, arrays) in zip(cuts, talks.turns, strict=True):
        forced = slice(cut, cut + len(phrase))
        assert arrays.token_ids[forced].tolist() == phrase
        assert not arrays.rollout_logprobs[forced].any()
        assert np.flatnonzero(~arrays.loss_mask).tolist() == list(range(forced.start, forced.stop))
    assert rollout.interrupted and not rollout.truncated
    assert sampled([rollout]) == sampled(arrays for _, arrays in talks.turns)
    assert error_of(talks.models[0], result.prompt.token_ids, rollout) <= TOLERANCE


def test_a_text_ends_a_turn_and_its_tokens_stay_in_it(run, talks):
    """What an agent sends as `stop`; with the same seed the turn is the beginning of the whole one."""
    context = ids_of(talks.tokenizer, USER)
    spec = SamplingSpec(max_tokens=60, seed=3, ignore_eos=True)

    async def both():
        whole = await talks.client.generate(context, sampling=spec)
        texts = [talks.tokenizer.decode(whole.token_ids[:size]) for size in range(1, 51)]
        # a character that is new where it ends a text: one that a later token completes is no text yet
        stop = next(text[-1] for text in texts[9:] if text[-1].isascii() and text[-1].isprintable())
        turn = await talks.client.generate(context, sampling=replace(spec, stop=("never", stop)))
        return whole, 1 + next(n for n, text in enumerate(texts) if stop in text), turn

    whole, size, turn = run(both())
    assert 1 < size < 60
    assert turn.token_ids == whole.token_ids[:size] and not turn.truncated and all(turn.loss_mask)
    np.testing.assert_allclose(turn.rollout_logprobs, whole.rollout_logprobs[:size], atol=1e-6)
    assert turn.policy_versions == whole.policy_versions[:size]

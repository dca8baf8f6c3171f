"""A vLLM engine and a trainer rank on one device: fp32 head, secret, pause, interruption, a weight update, parity."""

import asyncio
import contextlib
import json
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import engine_cases
import numpy as np
import pytest
from bench_decode import step_seconds
from engine_cases import ANSWER, CHOSEN, EXPERTS, LAYERS, Reference, sampled, samples_of
from gpu_cases import judge
from random_policy import train

from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.engine.client import WHOLE_DISTRIBUTION, SamplingSpec
from megatron_scalerl.launch.launcher import launching
from megatron_scalerl.launch.placement import Fleet
from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.plans import Draw, Plans, forced_ids
from megatron_scalerl.tiny.build import TinyArguments, build
from megatron_scalerl.types import Prompt

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SECRET = "a-secret-of-these-tests"
_GRID, _GRID_LEAST = 2.0**10, 0.15
"""Lower bound of the mean distance of log-prob differences, in units of 2**-10, from whole numbers: it is 1/4 for
fp32 logits and 0 for logits rounded to bf16, whose spacing is at least that from 1/4 on."""
_REPLAYED = 0.7
"""Bound of the mismatch with the engine's experts relative to that with the trainer's own. It is 0.3 with
transformers in bf16 as the engine and a trainer in fp32; the nearly equal experts of this policy cause the rest."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running fleet of one engine and one rank."""

    run: Callable[[Awaitable[Any]], Any]
    recipe: Recipe
    tokenizer: Any
    prompts: tuple[Prompt, ...]
    fleet: Fleet

    @property
    def client(self):
        return self.fleet.engines.alive[0]

    async def complete(self, tokens, count=8, **options):
        """One completion of each of the first prompts."""
        specs = [SamplingSpec(max_tokens=tokens, seed=i, ignore_eos=True, **options) for i in range(count)]
        return await asyncio.gather(
            *(self.client.generate(p.token_ids, sampling=s) for p, s in zip(self.prompts, specs))
        )


@contextlib.contextmanager
def serving(kind, folder, device, **sections):
    build(folder / "tiny", TinyArguments(seed=4, train_prompts=100, held_out=100, sft_examples=1))
    policy = engine_cases.write_policy(kind, folder / kind, device)
    recipe = engine_cases.recipe_of(policy, folder / "tiny", folder / "runs", device, **sections)
    inputs = check_inputs(recipe)
    recipe = inputs.resolved(recipe)
    with asyncio.Runner() as runner, contextlib.closing(RunFolder(recipe)) as run_folder:
        stack, attempt = contextlib.AsyncExitStack(), run_folder.attempt

        async def started():
            launcher = await stack.enter_async_context(launching(recipe, attempt, SECRET))
            trainer = await stack.enter_async_context(launcher.trainer(attempt))
            fleet = await launcher.start(trainer)
            await WeightSync(fleet.trainer, fleet.engines, recipe).publish(0)
            return fleet

        try:
            shared = dict(run=runner.run, recipe=recipe, tokenizer=inputs.tokenizer, prompts=inputs.prompts.held_out)
            yield Served(fleet=runner.run(started()), **shared)
        finally:
            runner.run(stack.aclose())


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    with serving("llama", tmp_path_factory.mktemp("engine"), device) as found:
        yield found


@pytest.fixture(scope="module")
def reference(served):
    return Reference(served.recipe.policy.path, served.recipe.policy.dtype)


def test_the_head_is_fp32(served):
    """By what its worker says, and by the log-probs of the five likeliest tokens at each of 32 steps."""
    params = WHOLE_DISTRIBUTION | dict(max_tokens=32, temperature=1.0, seed=0, logprobs=5, ignore_eos=True)
    body = {"token_ids": list(served.prompts[0].token_ids), "sampling_params": params | {"detokenize": False}}
    answer = json.loads(served.run(served.client.post("/inference/v1/generate", body)))
    content = answer["choices"][0]["logprobs"]["content"]
    rows = [sorted((row["logprob"] for row in step["top_logprobs"]), reverse=True)[:5] for step in content]
    scaled = [(row[0] - value) * _GRID for row in rows for value in row[1:] if value != row[0]]
    assert served.run(served.client.info()).head_dtype == "float32"
    assert statistics.fmean(abs(x - round(x)) for x in scaled) >= _GRID_LEAST


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_stops_tokens_and_loses_none(clear_cache, served, reference, record_property):
    """The engine's core answers fifty requests meanwhile, between which it would decode."""
    tokens, client = 2000, served.client

    async def scenario():
        start = (await client.progress()).tokens
        running = asyncio.create_task(served.complete(tokens, 1))
        await decoded(client, start + 12)
        await client.pause(clear_cache=clear_cache)
        await client.info()  # ends the current step
        before, paused = (await client.progress()).tokens, await client.get("/is_paused")
        for _ in range(50):
            await client.info()
        later = (await client.progress()).tokens
        await client.resume()
        return before - start, later - start, paused, (await running)[0]

    before, later, paused, rollout = served.run(scenario())
    assert b"true" in paused and 0 < before == later < tokens == len(rollout.token_ids)
    pairs = list(zip(reference.logprobs(served.prompts[0], rollout), rollout.rollout_logprobs))
    judge(record_property, {"nats": reference.distance(served.prompts[:1], [rollout], pairs)})


async def decoded(client, tokens):
    """Returns once the engine has generated that many tokens since it started."""
    async with asyncio.timeout(60):
        while (await client.progress()).tokens < tokens:
            await asyncio.sleep(0.005)


def test_thinking_is_interrupted_at_its_cut(served, device, record_property):
    """The phrase is at its position and masked, unless a completion ended or ended thinking before."""
    cuts = [3 + 7 * i for i in range(12 if device == "cpu" else 24)]
    specs = [Plans(served.recipe, served.tokenizer).spec(Draw(seed=i, thinking_cut=c), 0) for i, c in enumerate(cuts)]

    async def scenario():
        asked = zip(served.prompts, specs)
        return await asyncio.gather(*(served.client.generate(p.token_ids, sampling=s) for p, s in asked))

    phrase, tag = forced_ids(served.recipe, served.tokenizer)
    ends = set(end_token_ids(served.recipe.policy.path, served.tokenizer))
    rollouts = served.run(scenario())
    for cut, rollout in zip(cuts, rollouts):
        ids, end = rollout.token_ids, cut + len(phrase)
        closed = any(ids[i : i + len(tag)] == tag for i in range(cut - len(tag) + 1))
        assert rollout.interrupted != (closed or bool(ends & set(ids[:cut])))
        if rollout.interrupted:
            assert ids[cut:end] == phrase and len(ids) - end <= ANSWER
            assert rollout.loss_mask == (True,) * cut + (False,) * len(phrase) + (True,) * (len(ids) - end)
    assert any(rollout.interrupted for rollout in rollouts)
    record_property("interrupted", f"{sum(r.interrupted for r in rollouts)} of {len(rollouts)}")


def test_the_trainer_computes_the_engines_log_probs(served, reference, device, record_property):
    rollouts = served.run(served.complete(40 if device == "cpu" else 120))
    pairs = served.run(scored(served, rollouts))
    judge(record_property, {"nats": reference.distance(served.prompts[:8], rollouts, pairs)})


async def scored(served, rollouts, start=0):
    """(trainer's, engine's log-prob) of every sampled token from index `start` on."""
    rows = await served.fleet.trainer.logprobs(
        [[*p.token_ids, *r.token_ids] for p, r in zip(served.prompts, rollouts)]
    )
    found = []
    for prompt, rollout, row in zip(served.prompts, rollouts, rows):
        ours = sampled(rollout, row[len(prompt.token_ids) - 1 :])
        found += list(zip(ours, sampled(rollout, rollout.rollout_logprobs)))[start:]
    return found


def test_the_engine_decodes(served, record_property):
    for batch in (1, 64):
        record_property(f"ms per step of {batch}", served.run(step_seconds(served.client, batch)) * 1e3)


def test_weights_of_a_step_arrive_during_a_completion(served, reference, record_property):
    """The last test of this engine, whose weights change. Later tokens come from the new weights alone."""
    client, tokens = served.client, 1000
    fixed = [*served.prompts[0].token_ids, *range(6, 22)]

    async def scenario():
        await train(
            served.fleet.trainer, samples_of(served.prompts, await served.complete(40)), micro_batch_tokens=2048
        )
        before = await client.score(fixed)
        start = (await client.progress()).tokens
        running = asyncio.create_task(served.complete(tokens, 1))
        await decoded(client, start + 12)
        update = await WeightSync(served.fleet.trainer, served.fleet.engines, served.recipe).publish(1)
        [rollout] = await running
        apart = statistics.fmean(abs(a - b) for a, b in zip(before, await client.score(fixed)))
        return update, rollout, apart

    update, rollout, apart = served.run(scenario())
    at = rollout.policy_versions.index(1)
    assert rollout.policy_versions == (0,) * at + (1,) * (tokens - at) and at > 0
    assert apart > 0.1, "expected other log-probs after the update"
    record_property("seconds paused", update.seconds_paused)
    pairs = served.run(scored(served, [rollout], at))
    judge(record_property, {"nats": reference.distance(served.prompts[:1], [rollout], pairs)})


LIVE = {"lora/adapter": "llama", "latent/kimi": "kimi"}
"""Name -> the policy's kind."""


@pytest.mark.full
@pytest.mark.parametrize("name", LIVE)
def test_a_live_engine_of_adapters_or_latent_attention_gets_the_weights_of_a_step(
    name, device, tmp_path, record_property
):
    sections = dict(policy=dict(lora=dict(rank=8)))
    if name == "latent/kimi":
        of_gpus = dict(hf_overrides=dict(moe_router_dtype="float32"))
        sections = dict(vllm=dict(attention_backend="CPU_MLA") if device == "cpu" else of_gpus)
    with serving(LIVE[name], tmp_path, device, **sections) as served:
        reference = Reference(served.recipe.policy.path, served.recipe.policy.dtype)

        async def scenario():
            rollouts = [await served.complete(40)]
            before = await scored(served, rollouts[0])
            await train(served.fleet.trainer, samples_of(served.prompts, rollouts[0]), micro_batch_tokens=2048)
            old = await scored(served, rollouts[0])
            await WeightSync(served.fleet.trainer, served.fleet.engines, served.recipe).publish(1)
            rollouts.append(await served.complete(40))
            return rollouts, before, old, await scored(served, rollouts[1])

        rollouts, before, old, after = served.run(scenario())
    distances = {
        name: reference.distance(served.prompts[:8], sampled_now, pairs)
        for name, sampled_now, pairs in zip(("before", "after"), rollouts, (before, after))
    }
    judge(record_property, distances)
    assert statistics.fmean(abs(a - b) for a, b in old) > 0.01, "expected other log-probs after the step"


@pytest.mark.gpu
def test_the_trainer_replays_the_engines_experts(tmp_path, record_property):
    """vLLM's V2 model runner reports them; that of CPUs does not. The learning rate is 0."""
    sections = dict(rollouts=dict(routing_replay=True), optimizer=dict(lr=0.0))
    with serving("qwen3_moe", tmp_path, "gpu", **sections) as served:
        rollouts = served.run(served.complete(100))
        for prompt, rollout in zip(served.prompts, rollouts):
            found, tokens = rollout.expert_choices, len(prompt.token_ids) + len(rollout.token_ids) - 1
            values = np.frombuffer(found.data, dtype=f"<u{found.width}")
            assert (found.layers, found.topk, values.size) == (LAYERS, CHOSEN, tokens * LAYERS * CHOSEN)
            assert values.max() < EXPERTS and len(np.unique(values)) > 1

        async def mismatch(step, completions):
            samples = samples_of(served.prompts, completions)
            report = await train(served.fleet.trainer, samples, step=step, micro_batch_tokens=2048)
            return report.metrics["mismatch_mean"]

        replayed = served.run(mismatch(1, rollouts))
        own = served.run(mismatch(2, [replace(rollout, expert_choices=None) for rollout in rollouts]))
    judge(record_property, {"mismatch in nats": (replayed, _REPLAYED * own)})

"""Live weight updates into a real engine, verified by what it then generates."""

import asyncio
import contextlib
import shutil

import pytest
import tiny_policies
import torch
from engine_recipes import SECRET, recipe_for
from safetensors.torch import load_file, save_file
from sampling import sampled
from sender_process import SenderProcess, digest_of
from tiny_policies import error_of

from megatron_scalerl.controller.weight_sync import WeightsRefused, WeightSync
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.process import EngineProcess

pytestmark = pytest.mark.slow

PROMPT = [1, 30, 31, 32, 33, 34]


def greedy(tokens):
    return SamplingSpec(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def check_greedy(model, rollout):
    """The engine has the model's log-probs, and its choices."""
    assert error_of(model, PROMPT, rollout) <= 1e-4
    choices = tiny_policies.logprobs(model, PROMPT, list(rollout.token_ids)).argmax(-1)
    assert tuple(choices.tolist()) == rollout.token_ids


def step_of(folder, to, seed):
    """The policy after a step that changes one element in twenty."""
    shutil.copytree(folder, to)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for values in weights.values():
        chosen = torch.rand(values.shape, generator=generator) < 0.05
        values += chosen * torch.randn(values.shape, generator=generator) * 0.05
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def sync_of(sender, clients, recipe):
    return WeightSync(sender, Membership.of(clients), recipe)


def test_greedy_after_an_update_equals_the_new_weights(engine, policies, run):
    async def scenario():
        async with SenderProcess(policies["dense_b"]) as sender:
            sync = sync_of(sender, [engine.client], recipe_for(policies["dense_a"]))
            before = await engine.client.generate(PROMPT, sampling=greedy(64))
            update = await sync.publish(1)
            after = await engine.client.generate(PROMPT, sampling=greedy(64))
            info = await engine.client.info()
            sender.folder = policies["dense_a"]
            back = await sync.publish(2)
            again = await engine.client.generate(PROMPT, sampling=greedy(64))
            return before, update, after, info, back, again

    before, update, after, info, back, again = run(scenario())
    a, b = (tiny_policies.load(policies[name]) for name in ("dense_a", "dense_b"))
    assert set(before.policy_versions) == {0} and set(after.policy_versions) == {1}
    for rollout, model in ((before, a), (after, b), (again, a)):
        check_greedy(model, rollout)
    assert before.token_ids == again.token_ids != after.token_ids
    size = sum(p.numel() for p in b.parameters()) * 4
    assert size <= update.bytes < size + 16 * 100
    assert update.version == 1 and 0 < update.seconds_paused < update.seconds_total
    assert info.weight_version == "1" and len(info.weight_digests[0]) == 16
    expected = [digest_of(policies[name]) for name in ("dense_b", "dense_a")]
    assert [update.digest, back.digest] == expected and expected[0] != expected[1]
    run(engine.client.set_version(0))


async def long_completion(client):
    """One of 1,500 tokens that has begun."""
    long = asyncio.create_task(client.generate(PROMPT, sampling=greedy(1500)))
    # served in the same batch: when this one is done, the long one has begun
    await client.generate(PROMPT, sampling=greedy(30))
    return long


@contextlib.asynccontextmanager
async def paused_within_a_completion(client):
    """A block in which the engine pauses within the last of the list, which gets another where that one has ended."""
    begun, pause = [await long_completion(client)], client.pause

    async def within(*, clear_cache):
        await pause(clear_cache=clear_cache)
        while not (await client.progress()).cores[0].decoding:
            await client.resume()
            begun.append(await long_completion(client))
            await pause(clear_cache=clear_cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "pause", within)
        yield begun


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_an_update_in_flight(engine, policies, run, kv_cache):
    weights = {"bucket_mib": 1, "timeout_s": 120}
    recipe = recipe_for(policies["dense_a"], rollouts={"kv_cache": kv_cache}, weights=weights)

    async def scenario():
        async with SenderProcess(policies["dense_a"]) as sender:
            sync = sync_of(sender, [engine.client], recipe)
            await sync.publish(0)  # the connections take longer than an update, on a busy machine longer than `long`
            sender.folder = policies["dense_b"]
            async with paused_within_a_completion(engine.client) as begun:
                await sync.publish(1)
            rollout = await begun[-1]
            sender.folder = policies["dense_a"]
            await sync.publish(0)
            return rollout

    rollout = run(scenario())
    switch = rollout.policy_versions.index(1)
    assert 0 < switch < 1500 and rollout.policy_versions == (0,) * switch + (1,) * (1500 - switch)
    old, new = (tiny_policies.load(policies[name]) for name in ("dense_a", "dense_b"))
    assert error_of(old, PROMPT, rollout, 0, switch) <= 1e-4
    kept, recomputed = kept_cache_error(old, new, rollout, switch), error_of(new, PROMPT, rollout, switch)
    right, other = (kept, recomputed) if kv_cache == "keep" else (recomputed, kept)
    assert right <= 1e-4 < 1e-2 < other


@torch.no_grad()
def kept_cache_error(old, new, rollout, switch):
    """Largest error against the new weights with the KV cache of the old ones."""
    tokens = list(rollout.token_ids)
    full, cut = torch.tensor([PROMPT + tokens]), len(PROMPT) + switch - 1
    cache = old(full[:, :cut], use_cache=True).past_key_values
    expected = new(full[:, cut:], past_key_values=cache).logits[0].log_softmax(-1)
    return max(
        abs(expected[i - switch, tokens[i]].item() - rollout.rollout_logprobs[i]) for i in range(switch, len(tokens))
    )


def test_a_failed_update_raises_and_a_later_one_succeeds(engine, policies, run):
    recipe = recipe_for(policies["dense_a"])

    async def scenario():
        async with SenderProcess(policies["dense_b"]) as sender:
            sync = sync_of(sender, [engine.client], recipe)
            sender.dies = True
            with pytest.raises(RuntimeError, match="the sending process ended"):
                await sync.publish(1)
            # no new version, and still paused: nothing is sampled from half-loaded weights
            info = await engine.client.info()
            paused = await engine.client.get("/is_paused")
        async with SenderProcess(policies["dense_b"]) as sender:
            sync = sync_of(sender, [engine.client], recipe)
            await sync.publish(2)
            rollout = await engine.client.generate(PROMPT, sampling=greedy(64))
            sender.folder = policies["dense_a"]
            await sync.publish(0)
        return info, paused, rollout

    info, paused, rollout = run(scenario())
    assert (info.weight_version, info.weight_digests) == ("0", ("",)) and b"true" in paused
    check_greedy(tiny_policies.load(policies["dense_b"]), rollout)
    assert set(rollout.policy_versions) == {2}


GAPS = ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")
UNKNOWN = "model.layers.7.mlp.up_proj.weight"


def test_another_models_tensors_are_refused_by_name(engine, policies, run, tmp_path):
    weights = load_file(policies["dense_b"] / "model.safetensors")
    more = weights | {UNKNOWN: weights["model.layers.1.mlp.up_proj.weight"].clone()}
    lines = []

    async def refuse(folder, tensors):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        async with SenderProcess(folder) as sender:
            with pytest.raises(WeightsRefused, match=r"^engine-0: needs: weights: ") as refused:
                await sync_of(sender, [engine.client], recipe_for(policies["dense_a"])).publish(1)
        lines.append(str(refused.value))

    async def scenario():
        for gap in GAPS:
            await refuse(tmp_path / gap, {name: tensor for name, tensor in weights.items() if name != gap})
        await refuse(tmp_path / UNKNOWN, more)
        async with SenderProcess(policies["dense_a"]) as sender:
            await sync_of(sender, [engine.client], recipe_for(policies["dense_a"])).publish(0)

    run(scenario())
    qkv, norm, unknown = lines
    assert " model.layers.1.self_attn.qkv_proj.weight " in qkv and f" {64 * 64} values " in qkv
    assert " model.norm.weight " in norm and " 64 values " in norm
    assert UNKNOWN.removesuffix(".weight") in unknown


WORKERS = [("moe", 1, "shm"), ("dense", 2, "shm"), ("moe", 2, "gloo")]


@pytest.mark.parametrize("kind, tp, transport", sampled("workers", WORKERS, 1))
def test_every_tensor_parallel_worker_gets_its_own_parts(policies, run, tmp_path, kind, tp, transport):
    weights = {"bucket_mib": 1, "timeout_s": 120, "deltas": "absolute", "transport": transport}
    recipe = recipe_for(policies[f"{kind}_a"], vllm={"tensor_parallel_size": tp}, weights=weights)
    process = EngineProcess.local(recipe, secret=SECRET, log_path=tmp_path / "engine.log")
    steps = [policies[f"{kind}_b"]]
    for number in range(3):
        steps.append(step_of(steps[-1], tmp_path / f"step_{number}", seed=number))

    async def scenario():
        await process.start()
        try:
            async with SenderProcess(steps[0]) as sender:
                sync = sync_of(sender, [process.client], recipe)
                rollouts, updates = [await process.client.generate(PROMPT, sampling=greedy(64))], []
                for version, sender.folder in enumerate(steps):
                    updates.append(await sync.publish(version + 1))
                    rollouts.append(await process.client.generate(PROMPT, sampling=greedy(64)))
                return updates, rollouts
        finally:
            await process.stop()

    [update, *changes], rollouts = run(scenario())
    for folder, rollout in zip((policies[f"{kind}_a"], *steps), rollouts):
        model = tiny_policies.load(folder)
        check_greedy(model, rollout)
    assert update.bytes == update.whole_bytes
    assert all(0 < each.bytes < 0.1 * each.whole_bytes for each in changes) and len(changes) == 3
    if tp == 1:
        assert [u.digest for u in (update, *changes)] == [digest_of(folder) for folder in steps]
    assert "own loader" not in (tmp_path / "engine.log").read_text()
    assert len(set(update.digest.split("-"))) == tp
    # matrices are sent once in all, and only norms and the like to every worker
    size = sum(p.numel() for p in model.parameters()) * 4
    assert size * 0.99 <= update.bytes <= size * 1.1

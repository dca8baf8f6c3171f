"""Updates of adapters alone into a real engine with a prefix cache, verified by what it then generates."""

import asyncio

import pytest
import tiny_policies
import torch
from engine_recipes import cache_hits, recipe_for, served
from safetensors.torch import save_file
from sender_process import SenderProcess

from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.membership import Membership

pytestmark = pytest.mark.slow

RANK = 4
BLOCK = 32
"""Tokens of a block of the prefix cache."""
PREFIX = [1, *(30 + number % 40 for number in range(9 * BLOCK))]
"""Shared by all prompts."""
TOLERANCE = 2e-5
VERSIONS = 50


def recipe_of(folder, **sections):
    """A recipe with adapters, whose engines have a prefix cache as those of environments do."""
    return recipe_for(
        folder,
        policy={"lora": {"rank": RANK}},
        prompts={"chat_template": True},
        environment={"name": "episode_worlds:Said", "max_turns": 8, "episode_tokens": 1700},
        interruption={"thinking_tokens": [60, 90], "answer_tokens": 150},
        vllm={"block_size": BLOCK, "disable_log_stats": False},
        **sections,
    )


@pytest.fixture(scope="module")
def base(policies):
    return policies["dense_a"]


@pytest.fixture(scope="module")
def engine(run, base, tmp_path_factory):
    """A server that is sent adapters."""
    with served(run, recipe_of(base), tmp_path_factory.mktemp("adapters") / "engine.log") as process:
        yield process


class Adapters:
    """Adapters of a policy under PEFT's names, as a trainer sends them, and the policy with each merged."""

    def __init__(self, base, root):
        self._base = base
        self._root = root
        self._model = tiny_policies.load(base)
        self._weights = {name: value.clone() for name, value in self._model.state_dict().items()}

    def of(self, version):
        """PEFT's name -> A, or B times alpha / rank."""
        generator = torch.Generator().manual_seed(version)
        factors = {}
        for name, weight in self._weights.items():
            if weight.dim() == 2 and "layers" in name:
                stem = f"base_model.model.{name.removesuffix('weight')}"
                factors[f"{stem}lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
                factors[f"{stem}lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
        return factors

    def folder(self, version):
        """A folder for `SenderProcess`."""
        folder = self._root / str(version)
        if not folder.exists():
            folder.mkdir()
            save_file(self.of(version), folder / "model.safetensors")
        return folder

    def merged(self, version):
        """transformers' policy with W + B A."""
        factors = self.of(version)
        state = dict(self._weights)
        for name in state:
            stem = f"base_model.model.{name.removesuffix('weight')}"
            if f"{stem}lora_A.weight" in factors:
                state[name] = state[name] + factors[f"{stem}lora_B.weight"] @ factors[f"{stem}lora_A.weight"]
        self._model.load_state_dict(state)
        return self._model


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    return Adapters(base, tmp_path_factory.mktemp("adapters"))


def sample(tokens, seed=0):
    return SamplingSpec(max_tokens=tokens, seed=seed, ignore_eos=True)


def test_fifty_updates_in_flight_with_a_shared_prefix(engine, adapters, base, run):
    async def scenario():
        recipe = recipe_of(base)
        client = engine.client
        answers = []
        running = []
        async with SenderProcess(adapters.folder(0)) as sender:
            sync = WeightSync(sender, Membership.of([client]), recipe)
            await sync.publish(0)
            for version in range(1, VERSIONS + 1):
                await client.generate(PREFIX + [28], sampling=sample(2))
                cached = await cache_hits(client)
                running.append(asyncio.create_task(client.generate(PREFIX + [29], sampling=sample(60, version))))
                while await cache_hits(client) == cached:  # until it has begun, with the first one's prefix
                    await asyncio.sleep(0.002)
                sender.folder = adapters.folder(version)
                update = await sync.publish(version)
                before = await cache_hits(client)
                prompts = [[*PREFIX, 70 + version % 8], [*PREFIX, 80 + version % 8]]
                pair = [await client.generate(prompt, sampling=sample(6, version)) for prompt in prompts]
                answers.append((version, prompts, pair, await cache_hits(client) - before, update))
            return answers, await asyncio.gather(*running)

    answers, running = run(scenario())
    values = sum(value.numel() for value in adapters.of(0).values())
    digests = set()
    for version, prompts, pair, hit, update in answers:
        model = adapters.merged(version)
        for prompt, rollout in zip(prompts, pair):
            assert set(rollout.policy_versions) == {version}
            assert tiny_policies.error_of(model, prompt, rollout) <= TOLERANCE, version
        # the second prompt's prefix is the first one's, and neither is an older version's
        assert hit == 9 * BLOCK
        assert 4 * values <= update.bytes < 4 * values + 16 * 100
        digests.add(update.digest)
    assert len(digests) == VERSIONS
    switched = [rollout for rollout in running if len(set(rollout.policy_versions)) > 1]
    assert len(switched) >= VERSIONS // 2


@pytest.mark.parametrize("sections", [{"transport": "gloo"}, {"deltas": "absolute"}])
def test_an_update_over_every_way(engine, adapters, base, run, sections):
    recipe = recipe_of(base, weights={"bucket_mib": 1, "timeout_s": 120, **sections})

    async def scenario():
        async with SenderProcess(adapters.folder(2)) as sender:
            sync = WeightSync(sender, Membership.of([engine.client]), recipe)
            await sync.publish(2)
            sender.folder = adapters.folder(3)
            await sync.publish(3)
            return await engine.client.generate([*PREFIX, 70], sampling=sample(6))

    assert tiny_policies.error_of(adapters.merged(3), [*PREFIX, 70], run(scenario())) <= TOLERANCE

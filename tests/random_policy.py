"""The recipe of a random policy and random samples: what the trainer's tests train on."""

import random

from megatron_scalerl.batching.assignment import plan_step, sample_facts
from megatron_scalerl.batching.packing import pack
from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Rollout, Sample

VOCAB = 64


def make_recipe(path, /, **sections):
    """A recipe in fp32 without warm-up at a large learning rate; `sections` replace or extend it."""
    data = {
        "name": "test",
        "steps": 4,
        "policy": {"path": str(path), "dtype": "float32"},
        "prompts": {"path": "none.jsonl"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
        "trainer": {"micro_batch_tokens": 256},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values} if isinstance(values, dict) else values
    return Recipe.model_validate(data)


def random_samples(seed, count=6):
    """Samples of 5 to 40 tokens with masks, mixed versions 0 to 3, advantages, and log-probs near the trainer's."""
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        size = rng.randint(3, 32)
        rollout = Rollout(
            token_ids=tuple(rng.randrange(3, VOCAB) for _ in range(size)),
            rollout_logprobs=tuple(-rng.random() * 8 for _ in range(size)),
            policy_versions=tuple(sorted(rng.randint(0, 3) for _ in range(size))),
            loss_mask=tuple(rng.random() < 0.8 for _ in range(size - 1)) + (True,),
            interrupted=False,
            truncated=False,
            thinking_cut=0,
            seed=0,
        )
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 8)))
        samples.append(
            Sample(
                prompt_token_ids=prompt,
                rollout=rollout,
                advantage=rng.uniform(-2, 2),
                token_weight=rng.uniform(0.001, 0.02),
            )
        )
    return samples


DEFAULTS = {"step": 1, "dp_size": 1, "micro_batch_tokens": 256, "policy_version": 3}


def batches_of(samples, **options):
    """The samples packed for the ranks of `dp_size`, in rows of even length; `options` replace the defaults."""
    return pack(samples, **DEFAULTS | {"pad_multiple": 2} | options)


def plan_of(samples, **options):
    """The plan behind `batches_of`."""
    return plan_step([sample_facts(sample) for sample in samples], **DEFAULTS | options)


async def train(client, samples, **options):
    """One step of a client's trainer on the samples."""
    plan = plan_of(samples, **options)
    await client.prepare(plan, of_rollouts([sample.rollout for sample in samples]))
    return await client.step(plan.step)


def of_rollouts(rollouts):
    """Completions in memory."""

    async def read(numbers):
        return [write(rollouts[number]) for number in numbers]

    return read

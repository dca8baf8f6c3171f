"""A real fleet, one step of it and its generations."""

import asyncio
import contextlib

import numpy as np
from random_policy import of_rollouts

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.assignment import plan_step
from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.controller.samples import samples_of
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.launch.launcher import launching
from megatron_scalerl.types import RolloutGroup, Score

TOKENS = 24


SECRET = "secret" * 8


@contextlib.asynccontextmanager
async def fleet_of(recipe):
    """A trainer and an engine that holds the trainer's first version, and the run's folder."""
    with contextlib.closing(RunFolder(recipe)) as folder:
        async with (
            launching(recipe, folder.attempt, SECRET) as launcher,
            launcher.trainer(folder.attempt) as trainer,
        ):
            fleet = await launcher.start(trainer)
            sync = WeightSync(fleet.trainer, fleet.engines, recipe)
            await sync.publish(0)
            yield fleet, sync, folder


async def generate(engine, prompts, **sampling):
    spec = SamplingSpec(max_tokens=TOKENS, ignore_eos=True, **sampling)
    return await asyncio.gather(*(engine.generate(p.token_ids, sampling=spec) for p in prompts))


async def differences(fleet, prompts, rollouts):
    """|trainer - engine log-prob| of every generated token."""
    scored = await fleet.trainer.logprobs([[*p.token_ids, *r.token_ids] for p, r in zip(prompts, rollouts)])
    pairs = zip(prompts, rollouts, scored)
    return np.abs(np.concatenate([np.array(s[len(p.token_ids) - 1 :]) - r.rollout_logprobs for p, r, s in pairs]))


async def one_step(fleet, recipe, prompts, rollouts):
    """An optimiser step on made-up rewards: every second completion of a prompt is right."""
    half = len(prompts) // 2
    groups = [
        RolloutGroup(
            group_id=i,
            prompt=prompts[i],
            completions=tuple(facts_of(arrays_of(rollouts[n])) for n in (i, i + half)),
            positions=(0, 1),
            scores=(Score(correct=True, reward=1.0), Score(correct=False, reward=-1.0)),
            first_token_version=0,
            epoch=0,
        )
        for i in range(half)
    ]
    plan = samples_of(groups, ScaleRL(truncated="wrong", reduction=recipe.loss.reduction))
    planned = plan_step(
        plan.samples,
        step=1,
        dp_size=fleet.info.dp_size,
        micro_batch_tokens=512,
        policy_version=0,
    )
    await fleet.trainer.prepare(planned, of_rollouts([rollouts[i + half * n] for i in range(half) for n in (0, 1)]))
    return await fleet.trainer.step(planned.step)

"""Trainer and engine compute the same with adapters, sent alone and merged; so does what is exported."""

import asyncio
import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import tiny_logprobs
from live_fleet import SECRET, differences, generate, one_step
from whole_runs import ROOT, overrides

from megatron_scalerl.commands.export import export
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.distributed.cpu_compat import FLOOR
from megatron_scalerl.launch.launcher import launching
from megatron_scalerl.recipe.file import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.skipif(FLOOR, reason="adapters need Megatron-Core 0.19")]


TOLERANCE = 5e-5
"""Nats, of all tokens of texts, whose prompts have tokens far less likely than sampled ones."""


@contextlib.asynccontextmanager
async def fleet_of(recipe, inputs):
    """A trainer and an engine that holds the trainer's first version."""
    with contextlib.closing(RunFolder(recipe)) as folder:
        async with (
            launching(recipe, folder.attempt, SECRET) as launcher,
            launcher.trainer(folder.attempt) as trainer,
        ):
            fleet = await launcher.start(trainer)
            sync = WeightSync(fleet.trainer, fleet.engines, recipe)
            await sync.publish(0)
            yield fleet, sync, folder


async def trained(recipe, inputs):
    """Differences before and after a step, texts, the engine's log-probs of their tokens, and the update."""
    prompts = list(inputs.prompts.held_out[:4])
    async with fleet_of(recipe, inputs) as (fleet, sync, folder):
        [engine] = fleet.engines.alive
        rollouts = await generate(engine, [*prompts, *prompts], seed=5)
        fresh = await differences(fleet, [*prompts, *prompts], rollouts)
        rollouts = [replace(rollout, truncated=False) for rollout in rollouts]
        await one_step(fleet, recipe, [*prompts, *prompts], rollouts)
        update = await sync.publish(1)
        after = await generate(engine, prompts, seed=7)
        updated = await differences(fleet, prompts, after)
        texts = [[*prompt.token_ids, *rollout.token_ids] for prompt, rollout in zip(prompts, after)]
        scores = [await engine.score(text) for text in texts]
        await fleet.trainer.save(str(folder.checkpoint(1)), {})
        return fresh, updated, texts, scores, update


async def scored(recipe, inputs, texts):
    """An engine's log-probs of texts with the trainer's first version, and an update."""
    async with fleet_of(recipe, inputs) as (fleet, sync, _):
        [engine] = fleet.engines.alive
        return [await engine.score(text) for text in texts], await sync.publish(1)


def test_adapters_alone_and_merged_and_exported_are_the_same_policy(tiny_dense, tmp_path):
    settings = overrides(tiny_dense, tmp_path, "alone", "optimizer.lr=0.02", "optimizer.warmup_steps=0")
    settings.append("policy.lora={rank: 4, alpha: 12}")

    def inputs_of(*more):
        recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", [*settings, *more])
        inputs = check_inputs(recipe)
        return inputs.resolved(recipe), inputs

    fresh, updated, texts, scores, update = asyncio.run(trained(*inputs_of()))
    assert fresh.max() <= 1e-5 and updated.max() <= 1e-5
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert export(tmp_path / "alone", adapter) == export(tmp_path / "alone", merged, merged=True) == 1

    again = inputs_of("name=again", "weights.adapters=merged", f"policy.adapter={adapter}")
    found, whole = asyncio.run(scored(*again, texts))
    flat, expected = (np.array(list(itertools.chain(*values))) for values in (found, scores))
    assert np.abs(flat - expected).max() <= TOLERANCE
    assert update.bytes < whole.bytes / 2

    of_folder = np.array(list(itertools.chain(*tiny_logprobs.of(merged, texts))))
    of_base = np.array(list(itertools.chain(*tiny_logprobs.of(tiny_dense / "policy", texts))))
    assert np.abs(of_folder - expected).max() <= TOLERANCE < 1e-2 < np.abs(of_base - expected).max()

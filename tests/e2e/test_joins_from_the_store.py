"""A real engine joins while a real trainer steps: it serves the version of the others from the store.

Why this matters: all that it generates counts as that version's, and the trainer answers nothing meanwhile.
"""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from live_fleet import SECRET, differences, generate, one_step
from sampling import sampled
from whole_runs import ROOT, overrides

from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.controller.weight_store import weight_store
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.launch.launcher import launching
from megatron_scalerl.recipe.file import load_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def scenario(recipe, inputs):
    prompts = list(inputs.prompts.held_out[:4])
    with contextlib.closing(RunFolder(recipe)) as folder:
        async with (
            weight_store(recipe) as store,
            launching(recipe, folder.attempt, SECRET) as launcher,
            launcher.trainer(folder.attempt) as trainer,
        ):
            fleet = await launcher.start(trainer)
            engines = fleet.engines
            sync = WeightSync(fleet.trainer, engines, recipe, store)
            await sync.publish(0)
            first, late = engines.serving
            rollouts = await generate(first, [*prompts, *prompts], seed=5)
            engines.hold(late)  # it misses the next version
            rollouts = [replace(r, truncated=False) for r in rollouts]
            await one_step(fleet, recipe, [*prompts, *prompts], rollouts)
            await sync.publish(1)
            expected = await generate(first, prompts, temperature=0.0)

            engines.release(late)
            assert sync.stored_for() == [late]
            order = []

            async def step():
                await one_step(fleet, recipe, [*prompts, *prompts], rollouts, step=2)
                order.append("step")

            async def read():
                await sync.catch_up_from_store(1)
                order.append("joined")

            await asyncio.gather(step(), read())
            assert engines.serving == [first, late] and sync.stored_for() == []
            found = await generate(late, prompts, temperature=0.0)
            files = {
                path.name.rsplit("-", 2)[0]: path.stat().st_mode & 0o777 for path in Path(store.folder).iterdir()
            }
            update = await sync.publish(2)  # of both, over a new connection
            both = [await generate(engine, prompts, temperature=0.0) for engine in engines.serving]
            different = await differences(fleet, prompts, both[1])
    assert not Path(store.folder).exists()
    return expected, found, both, different, files, update


@pytest.mark.parametrize("deltas", sampled("joins", ["off", "absolute"], 1))
def test_an_engine_that_joins_while_the_trainer_steps_serves_what_the_others_serve(tiny_dense, tmp_path, deltas):
    settings = overrides(tiny_dense, tmp_path, "stored", "optimizer.lr=0.02", "optimizer.warmup_steps=0")
    settings += ["engine.count=2", f"weights.deltas={deltas}", f"weights.store={tmp_path}"]
    recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", settings)
    inputs = check_inputs(recipe)
    expected, found, both, different, files, update = asyncio.run(scenario(inputs.resolved(recipe), inputs))
    tokens = [[list(r.token_ids) for r in each] for each in (expected, found)]
    assert tokens[0] == tokens[1] and {v for r in found for v in r.policy_versions} == {1}
    assert {v for engine in both for r in engine for v in r.policy_versions} == {2}
    assert different.max() <= 1e-4 and update.bytes == update.whole_bytes
    assert set(files.values()) == {0o600}

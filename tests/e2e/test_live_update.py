"""Trainer and engine compute the same: on fresh weights, and after an optimiser step and a live update."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import open_doors
import pytest
from distributed.runner import run_ranks
from live_fleet import SECRET, TOKENS, differences, fleet_of, generate, one_step
from rich.console import Console
from whole_runs import ROOT, overrides

from megatron_scalerl.commands.export import export
from megatron_scalerl.controller.preflight import check_inputs
from megatron_scalerl.recipe.file import load_recipe

pytestmark = pytest.mark.slow


def check_doors(fleet):
    """With every group open: who could come in, and where the secret shows. The folder where they meet."""
    doors = open_doors.listening([os.getpid()])
    assert {door.command for door in doors if not door.loopback} == set()
    assert fleet.engines.alive[0].url in {f"http://{door.host}:{door.port}" for door in doors}
    assert open_doors.stores(doors) == {}
    assert open_doors.leaks([os.getpid()], SECRET) == []
    meeting = Path(fleet.trainer.rendezvous.folder)
    assert meeting.stat().st_mode & 0o777 == 0o700
    files = {path.name.split("-")[0]: path.read_bytes() for path in meeting.iterdir()}
    assert files.keys() == {"trainer"}  # the sockets of shared memory are deleted once all have come
    assert [name for name, content in files.items() if SECRET.encode() in content] == []
    return meeting


async def scenario(recipe, inputs, out):
    prompts = list(inputs.prompts.held_out[:4])
    async with fleet_of(recipe) as (fleet, sync, folder):
        [engine] = fleet.engines.alive
        meeting = check_doors(fleet)
        rollouts = await generate(engine, [*prompts, *prompts], seed=5)
        # the same prompt twice with the same seed; other tokens for the second half
        second = await generate(engine, prompts, seed=6)
        fresh = await differences(fleet, [*prompts, *prompts], rollouts)
        rollouts = [replace(r, truncated=False) for r in [*rollouts[:4], *second]]
        await one_step(fleet, recipe, [*prompts, *prompts], rollouts)
        before = await generate(engine, prompts, temperature=0.0)
        await sync.publish(1)
        after = await generate(engine, prompts, temperature=0.0)
        updated = await differences(fleet, prompts, after)
        await fleet.trainer.save(str(folder.checkpoint(1)), {})
    assert export(recipe.run_dir, out) == 1
    assert not meeting.exists()
    return prompts, fresh, before, after, updated


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.full)])
def test_engine_equals_trainer_before_and_after_an_update(kind, request, tmp_path):
    tiny = request.getfixturevalue(f"tiny_{kind}")
    settings = overrides(tiny, tmp_path, "live", "optimizer.lr=0.02", "optimizer.warmup_steps=0")
    recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", settings)
    inputs = check_inputs(recipe)
    recipe = inputs.resolved(recipe)
    out = tmp_path / "after_one_step"
    prompts, fresh, before, after, updated = asyncio.run(scenario(recipe, inputs, out))
    Console().print(f"{kind}: max |trainer - engine| {fresh.max():.2e} fresh, {updated.max():.2e} after the update")
    assert fresh.max() <= 1e-4 and updated.max() <= 1e-4
    assert {v for r in after for v in r.policy_versions} == {1}
    assert [r.token_ids for r in before] != [r.token_ids for r in after], "the step changed what is likeliest"
    ours = run_ranks(
        1,
        "e2e.greedy_ranks:greedy_tokens",
        str(tmp_path / "live/recipe.yaml"),
        str(out),
        [list(p.token_ids) for p in prompts],
        TOKENS,
    )
    assert [list(r.token_ids) for r in after] == ours[0]

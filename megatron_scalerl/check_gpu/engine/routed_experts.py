"""Check `routed experts`: vLLM's V2 model runner reports the experts of each token, the trainer replays them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_scalerl.batching.assignment import of_rollouts, plan_step, sample_facts
from megatron_scalerl.check_gpu.engine.reference import EXPERTS, LAYERS, write_experts
from megatron_scalerl.check_gpu.engine.scene import Scene, Training, engine_options, recipe_of, serve
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import Deadline
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.types import Prompt, Rollout, Sample

CHECK = "routed experts"
_RUN_S = 20.0
"""Assumed seconds of eight completions and two training steps after engine and trainer have started."""
_SHARE = 0.7
"""Bound of the mismatch with the engine's experts relative to that with the trainer's own. It is 0.3 with
transformers in bfloat16 as the engine and a trainer in fp32; the nearly equal experts of this policy cause the
rest."""


def replay_recipe(scene: Scene, start_s: float) -> Recipe:
    """A mixture of experts with routing replay and learning rate 0."""
    setting = scene.setting
    policy = write_experts(scene.folder / "experts", seed=2, dtype=scene.dtype)
    return recipe_of(
        setting,
        policy,
        start_s=start_s,
        vllm=engine_options(setting),
        rollouts={"kv_cache": "recompute", "routing_replay": True},
        interruption={"enabled": False},
        optimizer={"lr": 0.0, "warmup_steps": 0},
    )


async def check_routed_experts(
    scene: Scene, record: Recorder, deadline: Deadline, rendezvous: FolderRendezvous, *, start_s: float
) -> None:
    """Record CHECK. Raises RuntimeError if engine or trainer do not start.

    start_s: measured seconds of an engine's start.
    """
    no_cpu = "vLLM for CPUs has only the V1 model runner, which does not report experts"
    obstacle = scene.obstacle(deadline, start_s + _RUN_S, start_s, on_cpu=no_cpu)
    if obstacle:
        record.not_run(CHECK, obstacle)
        return
    recipe = replay_recipe(scene, deadline.left() - _RUN_S)
    training = Training(recipe, scene.folder, "trainer-experts", rendezvous)
    trainer = asyncio.create_task(training.start())
    try:
        serving = await serve(recipe, scene.folder / "engine-experts.log", index=1)
        try:
            prompts = scene.prompts[:8]
            rollouts = await expert_rollouts(serving.process.client, prompts)
            faults = choice_faults(
                prompts, rollouts, layers=LAYERS, topk=EXPERTS["num_experts_per_tok"], experts=EXPERTS["num_experts"]
            )
            if faults:
                record.faultless(CHECK, faults)
                return
            await trainer
            await record_replay(record, training, prompts, rollouts)
        finally:
            await serving.process.stop()
    finally:
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)
        await training.stop()


async def expert_rollouts(client: EngineClient, prompts: Sequence[Prompt]) -> list[Rollout]:
    """One completion of 100 tokens per prompt, with its experts."""
    return await asyncio.gather(
        *(
            client.generate(
                p.token_ids, sampling=SamplingSpec(max_tokens=100, seed=i, ignore_eos=True, routed_experts=True)
            )
            for i, p in enumerate(prompts)
        )
    )


def choice_faults(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], *, layers: int, topk: int, experts: int
) -> list[str]:
    """Faults of the experts reported with the completions."""
    faults = []
    for number, (prompt, rollout) in enumerate(zip(prompts, rollouts)):
        found, tokens = rollout.expert_choices, len(prompt.token_ids) + len(rollout.token_ids) - 1
        if found is None:
            faults.append(f"completion {number}: expected experts, found none")
            continue
        values = np.frombuffer(found.data, dtype=f"<u{found.width}")
        if (found.layers, found.topk, values.size) != (layers, topk, tokens * layers * topk):
            faults.append(
                f"completion {number}: expected experts of [{tokens}, {layers}, {topk}], found {values.size} numbers "
                f"of [*, {found.layers}, {found.topk}]"
            )
        elif values.max() >= experts or len(np.unique(values)) < 2:
            faults.append(f"completion {number}: expected several experts below {experts}, found {np.unique(values)}")
    return faults


async def record_replay(
    record: Recorder, training: Training, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> None:
    """Record one step with the engine's experts and one with the trainer's own; the weights do not change."""
    replayed = await mismatch(training, prompts, rollouts)
    own = await mismatch(training, prompts, [replace(rollout, expert_choices=None) for rollout in rollouts])
    record.measured(
        CHECK,
        replayed,
        "nats",
        at_most=_SHARE * own,
        detail=f"mean mismatch with the engine's experts; {own:.3g} with the trainer's own",
        data={"replayed": replayed, "own": own},
    )


async def mismatch(training: Training, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> float:
    """Mean |trainer - engine log-prob| (nats) in a training step on the completions."""
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    samples = [
        Sample(prompt_token_ids=p.token_ids, rollout=r, advantage=(-1.0) ** i, token_weight=1 / tokens)
        for i, (p, r) in enumerate(zip(prompts, rollouts))
    ]
    facts = [sample_facts(sample) for sample in samples]
    plan = plan_step(facts, step=1, dp_size=1, micro_batch_tokens=2048, policy_version=0)
    await training.client.prepare(plan, of_rollouts(rollouts))
    return (await training.client.step(plan.step)).metrics["mismatch_mean"]

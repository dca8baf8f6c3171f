"""Checks of engine and trainer together: a weight update during generation, and parity after it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_scalerl.check_gpu.engine.checks import until
from megatron_scalerl.check_gpu.engine.reference import Reference, bound_for, gap, record_gap, sampled
from megatron_scalerl.check_gpu.engine.scene import Scene, Serving, Training
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import limited
from megatron_scalerl.controller.probe import Probe
from megatron_scalerl.controller.weight_sync import WeightSync, WeightUpdate
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.launch.placement import Devices, Fleet
from megatron_scalerl.rollouts.sampler import Sampler
from megatron_scalerl.types import Prompt, Rollout

VERSION = 1


async def check_update(
    scene: Scene, record: Recorder, serving: Serving, sampler: Sampler, training: Training
) -> None:
    """Checks `update`, `trainer parity`, `probe`; the trainer sends weights that differ from the engine's."""
    client, log = serving.process.client, serving.log
    rollouts: list[Rollout] = []
    prompts = scene.prompts[:8]
    reference = Reference(scene.other)
    async with limited(record, "update", scene.setting.check_s, log):
        faults, update, at = await _update(scene, client, training)
        text = (
            f"{update.bytes / 2**20:.3g} MiB in {update.seconds_total:.3g} s, digest {update.digest}, at token {at}"
        )
        data = {"seconds_paused": update.seconds_paused, "seconds": update.seconds_total, "bytes": update.bytes}
        if faults:
            record.faultless("update", faults, data=data)
        else:
            record.measured("update", update.seconds_paused, "s paused", detail=text, data=data)
        rollouts = await _complete(client, prompts, tokens=40 if scene.setting.toy else 120)
    if not rollouts:
        for check in ("trainer parity", "probe"):
            record.not_run(check, "the engine does not have the trainer's weights")
        return
    bound = bound_for(scene.dtype, reference, [p.token_ids for p in prompts], rollouts)
    async with limited(record, "trainer parity", scene.setting.check_s, log):
        engine = [value for r in rollouts for value in sampled(r, r.rollout_logprobs)]
        trainer = await _scored(training, prompts, rollouts)
        exact = [
            v for p, r in zip(prompts, rollouts) for v in sampled(r, reference.logprobs(p.token_ids, r.token_ids))
        ]
        apart = {"trainer": gap(trainer, exact).mean, "engine": gap(engine, exact).mean}
        detail = (
            f"{len(engine)} tokens; mean difference from transformers in fp32: trainer {apart['trainer']:.2g}, "
            f"engine {apart['engine']:.2g}"
        )
        record_gap(record, "trainer parity", gap(trainer, engine), bound, detail, scene.dtype, from_fp32=apart)
    async with limited(record, "probe", scene.setting.check_s, log):
        assert training.client.info is not None
        fleet = Fleet(
            trainer=training.client,
            info=training.client.info,
            engines=Membership.of([client], version=VERSION),
            devices=Devices.of(scene.recipe),
        )
        found = await Probe(scene.recipe, sampler, fleet, prompts).check(VERSION)
        record.holds(
            "probe",
            True,
            f"mean {found['probe_mismatch_mean']:.2g}, largest {found['probe_mismatch_max']:.2g}",
            found,
        )


async def _update(scene: Scene, client: EngineClient, training: Training) -> tuple[list[str], WeightUpdate, int]:
    """(faults, the update, the token at which it arrived) of an update during a completion."""
    tokens, prompt = (1000 if scene.setting.toy else 2000), scene.prompts[0]
    fixed = [*prompt.token_ids, *range(6, 22)]
    sync = WeightSync(training.client, Membership.of([client]), scene.recipe)
    before = await client.score(fixed)
    start = (await client.progress()).tokens
    running = asyncio.create_task(_complete(client, [prompt], tokens=tokens))
    await until(client, start + 12)
    update = await sync.publish(VERSION)
    [rollout] = await running
    changed = gap(before, await client.score(fixed)).mean
    versions = rollout.policy_versions
    at = versions.index(VERSION) if VERSION in versions else len(versions)
    faults = []
    if not (0 < at < len(versions) and versions == (0,) * at + (VERSION,) * (len(versions) - at)):
        faults.append(
            f"expected versions 0 and then {VERSION} in a running completion, found {sorted(set(versions))}"
        )
    if changed < 0.1:
        faults.append(f"expected different log-probs after the update, found a mean difference of {changed:.2g} nats")
    faults += await _after_update(scene, training, prompt, rollout, at)
    return faults, update, at


async def _after_update(scene: Scene, training: Training, prompt: Prompt, rollout: Rollout, at: int) -> list[str]:
    """Faults unless the tokens from index `at` on, KV cache included, were computed with the new weights only."""
    [scored] = await training.client.logprobs([[*prompt.token_ids, *rollout.token_ids]])
    new = scored[len(prompt.token_ids) - 1 :]
    reference = Reference(scene.other)
    bound = bound_for(scene.dtype, reference, [prompt.token_ids], [rollout])
    found = gap(new[at:], rollout.rollout_logprobs[at:])
    value = bound.of(found)
    if value <= bound.nats:
        return []
    return [f"after the update: expected log-probs within {bound.nats:.2g} nats of the trainer's, found {value:.2g}"]


async def _complete(client: EngineClient, prompts: Sequence[Prompt], *, tokens: int) -> list[Rollout]:
    return await asyncio.gather(
        *(
            client.generate(p.token_ids, sampling=SamplingSpec(max_tokens=tokens, seed=i, ignore_eos=True))
            for i, p in enumerate(prompts)
        )
    )


async def _scored(training: Training, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[float]:
    """The trainer's log-probs of all sampled tokens, concatenated."""
    rows = await training.client.logprobs([[*p.token_ids, *r.token_ids] for p, r in zip(prompts, rollouts)])
    return [v for p, r, row in zip(prompts, rollouts, rows) for v in sampled(r, row[len(p.token_ids) - 1 :])]

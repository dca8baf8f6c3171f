"""Part engine: a vLLM engine and a trainer rank on the same device.

    engine, policy A:   start, fp32 head, secret, pause, interruption
    trainer, policy B:  sends its weights during a completion: update, then trainer parity, probe
    a second engine:    routed experts (GPUs only)
    two more:           decode rate (GPUs only), last, in the remaining time

A failure affects its own check only. Without an engine or a trainer, the checks that require it are `not run`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.check_gpu.engine import checks
from megatron_scalerl.check_gpu.engine.decode_rate import check_decode_rate
from megatron_scalerl.check_gpu.engine.reference import Reference, bound_for, gap
from megatron_scalerl.check_gpu.engine.routed_experts import check_routed_experts
from megatron_scalerl.check_gpu.engine.scene import ANSWER, Scene, Serving, Training, make_scene, serve
from megatron_scalerl.check_gpu.engine.update import check_update
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import Deadline, PartSetting, limited
from megatron_scalerl.check_gpu.tiny_task import forget_backend, remember_backend
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, private_folder
from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.rewards.pool import VerifierPool
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.plans import Draw, Plans, forced_ids
from megatron_scalerl.rollouts.sampler import VALIDATION_PRIORITY, Sampler
from megatron_scalerl.types import Rollout

ALONE = ("fp32 head", "secret", "pause", "interruption")
WITH_TRAINER = ("update", "trainer parity", "probe")
LAST = ("routed experts", "decode rate")
_FALLBACK = "TRITON_ATTN"
"""An attention backend that requires neither FlashAttention nor FlashInfer nor a compiler."""
_START_S = 100.0
"""Time limit of one start, which leaves time for another."""


def run(setting: PartSetting, record: Recorder) -> None:
    """All checks of the part."""
    deadline = Deadline(setting.limit_s)
    forget_backend(setting)
    scene = make_scene(setting, start_s=deadline.left(180))
    asyncio.run(_run(scene, record, deadline))


async def _run(scene: Scene, record: Recorder, deadline: Deadline) -> None:
    async with contextlib.AsyncExitStack() as stack:
        rendezvous = stack.enter_context(private_folder())
        training = _training(scene, rendezvous)
        stack.push_async_callback(training.stop)
        trainer = asyncio.create_task(training.start())
        stack.push_async_callback(_cancelled, trainer)
        serving = await _started(scene, record, deadline)
        if serving is None:
            for check in (*ALONE, *WITH_TRAINER, *LAST):
                record.not_run(check, "the engine did not start")
            return
        stack.push_async_callback(serving.process.stop)
        experts = asyncio.create_task(
            check_routed_experts(scene, record, deadline, rendezvous, start_s=serving.seconds)
        )
        stack.push_async_callback(_cancelled, experts)
        verifier = await stack.enter_async_context(VerifierPool(scene.recipe.rewards))
        plans = Plans(scene.recipe, scene.inputs.tokenizer)
        decoders = DecoderPool(scene.recipe, scene.inputs.tokenizer, plans, logs=scene.folder)
        await stack.enter_async_context(decoders)
        sampler = Sampler(plans, decoders=decoders, verifier=verifier)
        await _alone(scene, record, serving, sampler)
        await _with_trainer(scene, record, serving, sampler, training, trainer, deadline)
        async with limited(record, "routed experts", deadline.left(), scene.folder / "engine-experts.log"):
            await experts
    async with limited(record, "decode rate", deadline.left(), scene.folder / "engine-large.log"):
        await check_decode_rate(scene, record, deadline, start_s=serving.seconds)


def _training(scene: Scene, rendezvous: FolderRendezvous) -> Training:
    """The trainer rank with the other policy."""
    policy = scene.recipe.policy.model_copy(update={"path": str(scene.other)})
    return Training(scene.recipe.model_copy(update={"policy": policy}), scene.folder, "trainer", rendezvous)


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _started(scene: Scene, record: Recorder, deadline: Deadline) -> Serving | None:
    """Start the engine; on a GPU with another attention backend if vLLM's default does not start."""
    first = ""
    for number, backend in enumerate((None, _FALLBACK) if scene.setting.on_gpu else (None,)):
        vllm = scene.recipe.engine.vllm | ({} if backend is None else {"attention_backend": backend})
        limits = {"start_timeout_s": deadline.left(_START_S)}
        engine = scene.recipe.engine.model_copy(update={"vllm": vllm, **limits})
        try:
            serving = await serve(
                scene.recipe.model_copy(update={"engine": engine}), scene.folder / f"engine-{number}.log"
            )
        except RuntimeError as error:
            first = first or str(error)
            continue
        if backend is None:
            detail = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in serving.facts.items())
            record.measured("start", serving.seconds, "s", detail=detail, data=serving.facts)
        else:
            remember_backend(scene.setting, backend)
            record.holds("start", False, f"{first} (it starts with attention_backend={backend})", serving.facts)
        return serving
    record.holds("start", False, first)
    return None


async def _alone(scene: Scene, record: Recorder, serving: Serving, sampler: Sampler) -> None:
    client, prompt, log = serving.process.client, scene.prompts[0].token_ids, serving.log
    async with limited(record, "fp32 head", scene.setting.check_s, log):
        rows = await checks.likeliest(client, prompt, tokens=32)
        faults = checks.head_faults(serving.info.head_dtype, rows)
        fine = f"fp32 in its worker; {len(rows)} log-probs are {checks.off_grid(rows):.3g} off bfloat16's grid"
        record.faultless("fp32 head", faults, fine)
    async with limited(record, "secret", scene.setting.check_s, log):
        statuses = await checks.refused(client)
        faults = checks.open_paths(statuses)
        record.faultless("secret", faults, f"{len(statuses) - 1} requests refused")
    async with limited(record, "pause", scene.setting.check_s, log):
        tokens = 120 if scene.setting.toy else 240
        paused = [await checks.pause(client, prompt, tokens=tokens, clear_cache=clear) for clear in (False, True)]
        faults = [fault for found in paused for fault in checks.pause_faults(found)]
        faults += _cache_faults(scene, prompt, [found.rollout for found in paused])
        at = " and ".join(str(found.before) for found in paused)
        record.faultless("pause", faults, f"at token {at}: KV cache kept, KV cache recomputed")
    async with limited(record, "interruption", scene.setting.check_s, log):
        await _interruption(scene, record, serving, sampler)


def _cache_faults(scene: Scene, prompt: tuple[int, ...], rollouts: list[Rollout]) -> list[str]:
    """Faults if log-probs of paused completions differ from those of the policy on disk."""
    reference = Reference(Path(scene.recipe.policy.path))
    bound = bound_for(scene.dtype, reference, [prompt] * len(rollouts), rollouts)
    faults = []
    for rollout, cache in zip(rollouts, ("kept", "recomputed")):
        found = gap(reference.logprobs(prompt, rollout.token_ids), rollout.rollout_logprobs)
        if not bound.of(found) <= bound.nats:
            faults.append(
                f"KV cache {cache}: expected log-probs within {bound.nats:.2g} nats, found {bound.of(found):.2g}"
            )
    return faults


async def _interruption(scene: Scene, record: Recorder, serving: Serving, sampler: Sampler) -> None:
    recipe = scene.recipe
    cuts = [3 + 7 * i for i in range(12 if scene.setting.toy else 24)]
    done = await asyncio.gather(
        *(
            sampler.complete(
                serving.process.client, prompt, Draw(seed=i, thinking_cut=cut), priority=VALIDATION_PRIORITY
            )
            for i, (cut, prompt) in enumerate(zip(cuts, scene.prompts))
        )
    )
    phrase, think_end = forced_ids(recipe, scene.inputs.tokenizer)
    ends = end_token_ids(recipe.policy.path, scene.inputs.tokenizer)
    rollouts = [rollout_of(read(found.data)) for found in done]
    faults = [
        fault
        for rollout in rollouts
        for fault in checks.interruption_faults(
            rollout, phrase=phrase, think_end=think_end, ends=ends, version=0, answer_tokens=ANSWER
        )
    ]
    forced = sum(rollout.interrupted for rollout in rollouts)
    if not forced:
        faults.append(f"expected some of {len(done)} completions to be interrupted, found none")
    fine = f"{forced} of {len(done)} completions interrupted, with the phrase at its position and masked"
    record.faultless("interruption", faults, fine)


async def _with_trainer(
    scene: Scene,
    record: Recorder,
    serving: Serving,
    sampler: Sampler,
    training: Training,
    trainer: asyncio.Task[object],
    deadline: Deadline,
) -> None:
    """The trainer has been starting in parallel; the time limit is for one that is slower than the engine."""
    started = False
    async with limited(record, "trainer parity", deadline.left(scene.setting.check_s), training.log):
        await trainer
        started = True
    if started:
        await check_update(scene, record, serving, sampler, training)
        return
    for check in ("update", "probe"):
        record.not_run(check, "the trainer did not start")

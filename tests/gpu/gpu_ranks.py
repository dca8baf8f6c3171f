"""What one rank of the GPU checks does, on its device."""

import gc
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gathered_weights import gathered
from gpu_cases import Step
from safetensors.torch import save_file

from megatron_scalerl.batching.assignment import plan_step, sample_facts
from megatron_scalerl.batching.packing import pack
from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.distributed.parallel import shutdown_parallel, unwrap
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.trainer import checkpoint
from megatron_scalerl.trainer.batch_frames import BatchFrames
from megatron_scalerl.trainer.messages import batch_frames
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer
from megatron_scalerl.types import Batch
from megatron_scalerl.weights.source import MegatronWeightSource

RECIPE_8B = Path(__file__).parents[2] / "recipes" / "scalerl_llama3_8b.yaml"


def steps(cases):
    """Log-probs, one step, log-probs again, for each case."""
    found = []
    for number, case in enumerate(cases):
        if number:
            shutdown_parallel(keep_world=True)
        parallel = init_parallel(case.recipe())
        found.append(_step(case, make_trainer(case.recipe(), parallel), parallel))
    return found


def _step(case, trainer, parallel):
    ids = case.token_ids()
    before = trainer.logprobs(ids)
    samples = case.samples(None if case.capped else before)
    plan = plan_step(
        [sample_facts(sample) for sample in samples],
        step=1,
        dp_size=parallel.dp_size,
        micro_batch_tokens=case.micro_batch_tokens,
        policy_version=0,
    )
    batches = BatchFrames(parallel, pad_multiple=trainer.pad_multiple)
    if parallel.holds_batch:  # the others get it from this rank, as in a run
        own = [write(samples[number].rollout) for number in plan.numbers[parallel.dp_rank]]
        batches.hold(batch_frames(plan.ranks[parallel.dp_rank], own))
    report = trainer.step(batches.take(1))
    return Step(
        logprobs=np.concatenate(before),
        after=np.concatenate(trainer.logprobs(ids)),
        loss=report.loss,
        grad_norm=report.grad_norm,
        gradient=_gradient(trainer) if case.capped else None,
        weights=_joined(p.detach() for p in _parameters(trainer)) if case.capped else None,
    )


def _parameters(trainer):
    return list(unwrap(trainer.chunks[0]).parameters())


def _gradient(trainer):
    return _joined(p.main_grad for p in _parameters(trainer))


def _joined(tensors):
    return np.concatenate([tensor.float().flatten().cpu().numpy() for tensor in tensors])


def merged(case, folder):
    """Log-probs before and after a step of adapters, and those of the weights into which they are then merged."""
    parallel = init_parallel(case.recipe())
    trainer = make_trainer(case.recipe(), parallel)
    step = _step(case, trainer, parallel)
    source = MegatronWeightSource(trainer.chunks, parallel)
    source.read = source.as_sent
    tensors = gathered(source)
    if parallel.rank == 0:
        shutil.copy(case.path / "config.json", folder)
        save_file(tensors, folder / "model.safetensors")
    torch.distributed.barrier()
    shutdown_parallel(keep_world=True)
    recipe = replace(case, path=folder, lora=False).recipe()
    whole = make_trainer(recipe, init_parallel(recipe)).logprobs(case.token_ids())
    return step.logprobs, step.after, np.concatenate(whole)


def packing(case):
    """(log-probs and gradient of packed sequences, the same with one sequence per row); weights do not change."""
    parallel = init_parallel(case.recipe())
    trainer = make_trainer(case.recipe(), parallel, learning_rate=lambda step: 0.0)
    ids, samples = case.token_ids(), case.samples()
    packed = np.concatenate(trainer.logprobs(ids))
    alone = np.concatenate([trainer.logprobs([row])[0] for row in ids])
    rows = batch_of(samples, case.micro_batch_tokens, step=1)
    single = tuple(m for s in samples for m in batch_of([s], case.micro_batch_tokens).micro_batches)
    assert len(rows.micro_batches) < len(single)
    trainer.step(rows)
    gradient = _gradient(trainer)
    trainer.step(Batch(step=2, micro_batches=single))
    return packed, gradient, alone, _gradient(trainer)


def batch_of(samples, micro_batch_tokens, *, step=1):
    """The samples packed for one rank."""
    options = dict(dp_size=1, micro_batch_tokens=micro_batch_tokens, pad_multiple=1, policy_version=0)
    [batch] = pack(samples, step=step, **options)
    return batch


def memory_after_steps(case):
    """Bytes that tensors have on the device (on a CPU: resident) after each of steps 2 to 6."""
    from bench_shapes import memory

    trainer = make_trainer(case.recipe(), init_parallel(case.recipe()))
    batch = batch_of(case.samples(), case.micro_batch_tokens)
    found = []
    for step in range(1, 7):
        trainer.step(replace(batch, step=step))
        gc.collect()
        found.append(memory().allocated)
    return found[1:]


def saved_and_loaded(case, path):
    """One trainer saves, another loads: tensors that differ, and step counters after one more step of it."""
    parallel = init_parallel(case.recipe())
    trainer, other = (make_trainer(case.recipe(), parallel) for _ in range(2))
    batch = batch_of(case.samples(), case.micro_batch_tokens)
    trainer.step(batch)
    before = _state(other)
    checkpoint.save(path, trainer, {"written_by": "tests"})
    extra = checkpoint.load(path, other)
    saved, loaded = _state(trainer), _state(other)
    other.step(replace(batch, step=2))
    return {
        "extra": extra,
        "names": (sorted(saved), sorted(loaded)),
        "different": [name for name in saved if name in loaded and not torch.equal(saved[name], loaded[name])],
        "changed": [name for name in loaded if name in before and not torch.equal(before[name], loaded[name])],
        "devices": {value.device.type for value in loaded.values() if value.dim()} - {parallel.device.type},
        "counters": tuple(
            {int(v) for n, v in state.items() if n.startswith("step ")} for state in (saved, _state(other))
        ),
    }


def _state(trainer):
    """Weights, main weights and optimizer state by name."""
    named = unwrap(trainer.chunks[0]).named_parameters()
    found = {f"weight {name}": parameter.detach().clone() for name, parameter in named}
    for i, optimizer in enumerate(trainer.optimizer.chained_optimizers):
        for j, group in enumerate(optimizer.optimizer.param_groups):
            if not any("step" in state for state in optimizer.optimizer.state.values()):
                # fused Adam counts steps per group; PyTorch's counts them per parameter, and loading sets both
                found[f"step {i}.{j}"] = torch.tensor(int(group.get("step", 0)))
            for k, parameter in enumerate(group["params"]):
                found[f"main weight {i}.{j}.{k}"] = parameter.detach().clone()
                for name, value in optimizer.optimizer.state.get(parameter, {}).items():
                    kept = torch.as_tensor(value).detach().clone()
                    found[f"{name} {i}.{j}.{k}"] = kept if kept.dim() else kept.cpu()  # counters may be on either
    return found


def layout_of_8b(overrides):
    """`bench_shapes.train` for four steps of the 8B recipe under `overrides`, two micro-batches for each rank."""
    from bench_shapes import memory, reset_peaks, train, used_on_gpu

    from megatron_scalerl.distributed import device

    before = used_on_gpu() if device.HAVE_GPU else None  # first: CUDA context and NCCL count for this rank
    recipe = load_recipe(RECIPE_8B, overrides)
    parallel = init_parallel(recipe)
    reset_peaks()
    before = before if device.HAVE_GPU else memory().used
    return train(recipe, parallel, before, count=2, length=recipe.micro_batch_tokens, steps=4)


def send(matrices, width):
    """(digests of three updates with the same weights, GiB per second of the fastest)."""
    from worker_needs import whole_plan

    from megatron_scalerl.distributed import device
    from megatron_scalerl.distributed.rendezvous import private_folder, use_interface
    from megatron_scalerl.weights.plan import Connection, buckets, manifest_of
    from megatron_scalerl.weights.transport import make_sender

    generator = torch.Generator(device.device()).manual_seed(2)
    options = dict(device=device.device(), dtype=torch.bfloat16, generator=generator)
    tensors = [torch.randn(width, width, **options) for _ in range(matrices)]
    plan = whole_plan(manifest_of((f"w{n}", "bfloat16", t.shape) for n, t in enumerate(tensors)))
    digests, seconds = set(), []
    with private_folder() as rendezvous:
        use_interface(rendezvous)  # before the first group, so that gloo and NCCL listen on loopback only
        group = dict(backend=device.backend(), rendezvous=rendezvous, group="check", world_sizes=(1,), bucket_mib=64)
        sender = make_sender(Connection(**group, timeout_s=30.0, connect_timeout_s=30.0))
        for version in (1, 2, 3):
            begin = time.perf_counter()
            sender.send(plan, tensors.__getitem__, version)
            digests.add(sender.values[0])  # the wire's have the version
            seconds.append(time.perf_counter() - begin)
        sender.close()
    return digests, sum(bucket.nbytes for bucket in buckets(plan, 64)) / 2**30 / min(seconds)

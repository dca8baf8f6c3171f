"""What one rank of the trainer's distributed tests does."""

import os
from pathlib import Path

from random_policy import batches_of, make_recipe, random_samples

SMOOTH = {"lr": 1e-2, "warmup_steps": 0, "eps": 1e-3, "clip_grad": 0.5}
"""AdamW whose first step is smooth in the gradient: with a tiny epsilon rounding would turn into steps."""
PROBE = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 30, 40, 50]]


def recipe(policy, layout, /, **sections):
    """The tests' recipe under a layout (sizes, and under `model` and `ddp` what else it needs) in this world."""
    world_size = int(os.environ["WORLD_SIZE"])
    parallel = {key: size for key, size in layout.items() if key not in ("model", "ddp")}
    model = {"sequence_parallel": True} if parallel.get("tensor_model_parallel_size", 1) > 1 else {}
    return make_recipe(
        Path(policy),
        **{
            "optimizer": SMOOTH,
            "trainer": {"world_size": world_size, "micro_batch_tokens": 128},
            "megatron": {
                "parallel": parallel,
                "model": model | layout.get("model", {}),
                "ddp": layout.get("ddp", {}),
            },
            **sections,
        },
    )


def trainer_of(settings):
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

    return make_trainer(settings, init_parallel(settings))


def release():
    """Destroys the groups, so that the next job can create its own."""
    import torch.distributed as dist

    from megatron_scalerl.distributed.parallel import shutdown_parallel

    dist.barrier()
    shutdown_parallel(keep_world=True)


def many(jobs):
    """For each (name, policy, layout, number of samples, sections): two steps, as this rank saw them."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    # Ranks that ask each other once a micro-batch would make a GPU's host wait: here it is an error.
    P2PCommunicator._communicate_shapes = None
    found = {}
    for name, policy, parallel, count, sections in jobs:
        trainer = trainer_of(recipe(policy, parallel, **sections))
        reports = [_step(trainer, step, count) for step in (1, 2)]
        found[name] = {
            "reports": [(r.loss, r.grad_norm, r.tokens, dict(r.metrics)) for r in reports],
            "logprobs": trainer.logprobs(PROBE),
        }
        release()
    return found


def _step(trainer, step, count=6):
    place = trainer.parallel
    batches = batches_of(random_samples(step, count), step=step, dp_size=place.dp_size, micro_batch_tokens=64)
    return trainer.step(batches[place.dp_rank])


def changes(policy, parallel):
    """(elements of this rank's bf16 parameters that a small step changed, elements, the step's metric)."""
    from megatron_scalerl.distributed.parallel import unwrap

    settings = {"policy": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-4, "warmup_steps": 0}}
    trainer = trainer_of(recipe(policy, parallel, **settings))
    held = list(unwrap(trainer.chunks[0]).parameters())
    before = [p.detach().clone() for p in held]
    found = _step(trainer, 1).metrics["weights_changed"]
    release()
    return sum(int((p != old).sum()) for p, old in zip(held, before)), sum(p.numel() for p in held), found


def train_and_save(policy, parallel, path, asynchronous=False):
    """Two steps, a checkpoint, two more; the weights after them, and all optimizer state of this rank.

    asynchronous: the checkpoint is committed after the last step.
    """
    from megatron_scalerl.trainer.checkpoint import begin_save, save

    trainer = trainer_of(recipe(policy, parallel))
    for step in (1, 2):
        _step(trainer, step)
    if not asynchronous:
        save(path, trainer, {"rank": trainer.parallel.rank})
        return _rest(trainer)
    saving = begin_save(path, trainer, {"rank": trainer.parallel.rank})
    rest = _rest(trainer)
    assert saving.finish(wait=True) is not None
    return rest


def optimizer_bytes(policy, parallel):
    """(bytes of memory behind the optimizer's state as a checkpoint gets it on this rank, bytes of what it stands
    for)."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from megatron_scalerl.trainer.checkpoint import _sharded_state

    trainer = trainer_of(recipe(policy, parallel))
    _step(trainer, 1)
    every = nested_values(_sharded_state(trainer, loading=False, generators=False)["optimizer"])
    tensors = [each.data for each in every if isinstance(getattr(each, "data", None), torch.Tensor)]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(memory.values()), sum(each.nbytes for each in tensors)


def load_and_train(policy, parallel, path):
    """The checkpoint, and the same last two steps."""
    from megatron_scalerl.trainer.checkpoint import load

    trainer = trainer_of(recipe(policy, parallel))
    extra = load(path, trainer)
    return {"extra": extra, "made": trainer.steps_made, "counters": _counters(trainer), **_rest(trainer)}


def each(name, jobs):
    """The function of this module that `name` names, once for each tuple of arguments."""
    found = []
    for job in jobs:
        found.append(globals()[name](*job))
        release()
    return found


def _rest(trainer):
    reports = [_step(trainer, step) for step in (3, 4)]
    return {
        "reports": [(r.loss, r.grad_norm) for r in reports],
        "weights": _weights(trainer),
        "optimizer": _optimizer_state(trainer),
        "final_counters": _counters(trainer),
    }


def _weights(trainer):
    from megatron_scalerl.distributed.parallel import unwrap

    return {name: p.detach().clone() for name, p in unwrap(trainer.chunks[0]).named_parameters()}


def _optimizer_state(trainer):
    import torch

    states = []
    for optimizer in trainer.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                states.append([parameter.detach().clone(), *(torch.as_tensor(v).clone() for v in state.values())])
    return states


def _counters(trainer):
    """AdamW's step counters of all parameters of this rank."""
    return {
        float(state["step"])
        for optimizer in trainer.optimizer.chained_optimizers
        for state in optimizer.optimizer.state.values()
    }

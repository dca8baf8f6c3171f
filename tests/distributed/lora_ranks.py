"""What one rank of the adapters' tests does: build, forward and backward, optimizer steps, checkpoints."""

import os

import random_policies
import torch
from gathered_weights import gathered
from lora_reference import SETTINGS
from parity_ranks import _forward_backward, recipe


def settings_of(path, layout, **more):
    """The recipe of a layout with adapters; `lora` and `adapter` in the layout are keys of the policy."""
    layout = dict(layout)
    policy = dict(lora=layout.pop("lora", SETTINGS), adapter=layout.pop("adapter", None))
    settings = recipe(path, int(os.environ["WORLD_SIZE"]), layout).model_dump()
    settings["policy"] |= policy
    settings["optimizer"] |= more
    return type(recipe(path, int(os.environ["WORLD_SIZE"]), layout)).model_validate(settings)


def many(jobs):
    """Runs (name, policy path, adapter path, layout) one after the other in this rank; this rank's answers by name."""
    return {name: measure(path, {"adapter": adapter, **layout}) for name, path, adapter, layout in jobs}


def measure(path, layout):
    """Loss, log-probabilities of this rank's rows, gradients of the factors, gradient norm and what is trained."""
    import torch.distributed as dist

    from megatron_scalerl.distributed.parallel import shutdown_parallel, unwrap
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.weights.source import MegatronWeightSource

    layout = dict(layout)
    rows = random_policies.rows(layout.pop("rows", random_policies.ROWS))
    settings = settings_of(path, layout)
    parallel = init_parallel(settings)
    chunks = build_policy(path, settings, parallel)
    optimizer = build_optimizer(chunks, settings)
    source = MegatronWeightSource(chunks, parallel, family=unwrap(chunks[0]).adapters)
    found = {"factors": gathered(source)}
    found["loss"], found["logprobs"] = _forward_backward(chunks, parallel, rows)
    trained = [(name, p) for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad]
    found["trained"] = [name for name, _ in trained]
    if not chunks[0].ddp_config.use_distributed_optimizer:
        found["grads"] = _gradients(source, trained)
    _, norm, _ = optimizer.step()
    found["grad_norm"] = float(norm)
    dist.barrier()
    shutdown_parallel(keep_world=True)
    return found


def _gradients(source, trained):
    """Gradients by PEFT's names: they ride through the weight map in the parameters' place."""
    kept = [(p, p.data.clone()) for _, p in trained]
    for parameter, _ in kept:
        parameter.data.copy_(parameter.main_grad)
    gradients = gathered(source)
    for parameter, data in kept:
        parameter.data.copy_(data)
    return gradients

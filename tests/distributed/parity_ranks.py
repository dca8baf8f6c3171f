"""What one rank of the parity tests does: build, one forward and backward pass, one optimizer step, export."""

import contextlib
import os

import random_policies
import torch
from gathered_weights import gathered
from policy_rows import arguments
from random_policy import make_recipe


def recipe(path, world_size, layout):
    """The smallest recipe with this layout: keys of megatron.parallel, and model=, ddp=, dtype=, logits=."""
    layout = dict(layout)
    policy = dict(dtype=layout.pop("dtype", "float32"), logits=layout.pop("logits", "fp32"))
    megatron = dict(model=layout.pop("model", {}), ddp=layout.pop("ddp", {}), parallel=layout)
    return make_recipe(
        path,
        policy=policy,
        trainer=dict(world_size=world_size),
        optimizer=dict(clip_grad=1.0, warmup_steps=100),
        megatron=megatron,
    )


@contextlib.contextmanager
def built(path, layout, settings_of=None, **options):
    """(model chunks, this rank's coordinates, recipe) of a policy; then the groups go, so that others can come."""
    import torch.distributed as dist

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.ranks import init_parallel

    settings = settings_of(path, layout) if settings_of else recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    parallel = init_parallel(settings)
    yield build_policy(path, settings, parallel, **options), parallel, settings
    dist.barrier()
    shutdown_parallel(keep_world=True)


def many(jobs):
    """Runs (name, policy path, layout) one after the other in this rank; rank 0's answers by name."""
    return {name: measure(path, layout) for name, path, layout in jobs}


def measure(path, layout):
    """Loss, gradient norm, gradients and exported weights of one step on the fixed rows under a layout."""
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.weights.source import MegatronWeightSource

    layout = dict(layout)
    lengths = layout.pop("rows", random_policies.ROWS)
    with built(path, layout) as (chunks, parallel, settings):
        optimizer = build_optimizer(chunks, settings)
        source = MegatronWeightSource(chunks, parallel)
        found = {"weights": gathered(source)}
        found["loss"], found["logprobs"] = _forward_backward(chunks, parallel, random_policies.rows(lengths))
        if not chunks[0].ddp_config.use_distributed_optimizer:
            found["grads"] = gradients_of(source, [p for chunk in chunks for p in chunk.parameters()])
        _, found["grad_norm"], _ = optimizer.step()
        found["stepped"] = gathered(source)
        found["manifest"] = [(meta.name, meta.dtype, meta.shape) for meta in source.plan.parameters]
    return found


def gradients_of(source, parameters):
    """Gradients in the source's names: they ride through the weight map in the parameters' place."""
    kept = [(p, p.data.clone()) for p in parameters]
    for parameter, _ in kept:
        parameter.data.copy_(parameter.main_grad)
    grads = gathered(source)
    for parameter, data in kept:
        parameter.data.copy_(data)
    return grads


def backward(chunks, forward, rows):
    """Gradients of the rows, a micro-batch each, through Megatron's schedule."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
        model=chunks,
        num_microbatches=len(rows),
        seq_length=max(row["tokens"].shape[1] for row in rows),
        micro_batch_size=1,
        forward_only=False,
    )


def _forward_backward(chunks, parallel, rows):
    """Summed loss over all rows, and log-probabilities of this rank's rows on the last stage."""
    import torch.distributed as dist

    mine = rows[parallel.dp_rank :: parallel.dp_size]
    logprobs = []
    total = torch.zeros(1)

    def forward(iterator, model):
        row = next(iterator)
        output = model(**arguments(model, row))

        def loss(output):
            logprobs.append(output.detach().clone())
            value = -(output[0] * row["weights"]).sum()
            total.add_(value.detach())
            return value * (len(mine) * parallel.dp_size), {}

        return output, loss

    backward(chunks, forward, mine)
    if not parallel.is_last_stage or parallel.tp_rank or parallel.cp_rank:
        total.zero_()
    dist.all_reduce(total)
    return float(total), torch.cat(logprobs, dim=1) if logprobs else None

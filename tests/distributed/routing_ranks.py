"""What one rank of the routing replay tests does: one forward and backward pass with given experts."""

import os

import parity_ranks
import torch
from policy_rows import arguments

Row = dict[str, torch.Tensor]


def many(jobs):
    """Runs (name, policy path, layout, rows) one after the other; this rank's answers by name."""
    return {name: measure(path, layout, rows) for name, path, layout, rows in jobs}


def measure(path, layout, rows):
    """Log-probabilities of the targets and gradients of their sum, with the rows' experts where they bring some."""
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.weights.source import MegatronWeightSource

    settings = parity_ranks.recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    parallel = init_parallel(settings)
    chunks = build_policy(path, settings, parallel)
    source = MegatronWeightSource(chunks, parallel)
    get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
    mine = rows[parallel.dp_rank :: parallel.dp_size]
    logprobs = []

    def forward(iterator, model):
        row = next(iterator)
        choices = row.get("expert_choices")
        output = model(**arguments(model, row), expert_choices=choices)

        def loss(output):
            logprobs.append(output[0].detach().clone())
            return -output[0].sum() * (len(mine) * parallel.dp_size), {}

        return output, loss

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(mine),
        model=chunks,
        num_microbatches=len(mine),
        seq_length=mine[0]["tokens"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    grads = parity_ranks._export_grads(source, chunks)
    dist.barrier()
    shutdown_parallel(keep_world=True)
    return {"logprobs": torch.stack(logprobs) if logprobs else None, "grads": grads}

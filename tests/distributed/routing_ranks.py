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

    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.weights.source import MegatronWeightSource

    settings = parity_ranks.recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    parallel = init_parallel(settings)
    chunks = build_policy(path, settings, parallel)
    source = MegatronWeightSource(chunks, parallel)
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

    parity_ranks.backward(chunks, forward, mine)
    grads = parity_ranks._export_grads(source, chunks)
    dist.barrier()
    shutdown_parallel(keep_world=True)
    return {"logprobs": torch.stack(logprobs) if logprobs else None, "grads": grads}

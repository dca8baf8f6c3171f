"""What one rank of the routing replay tests does: one forward and backward pass with given experts."""

import parity_ranks
import torch
from policy_rows import arguments


def many(jobs):
    """Runs (name, policy path, layout, rows) one after the other; this rank's answers by name."""
    return {name: measure(path, layout, rows) for name, path, layout, rows in jobs}


def measure(path, layout, rows):
    """Log-probabilities of the targets and gradients of their sum, with the rows' experts where they bring some."""
    from megatron_scalerl.weights.source import MegatronWeightSource

    with parity_ranks.built(path, layout) as (chunks, parallel, _):
        source = MegatronWeightSource(chunks, parallel)
        mine = rows[parallel.dp_rank :: parallel.dp_size]
        logprobs = []

        def forward(iterator, model):
            row = next(iterator)
            output = model(**arguments(model, row), expert_choices=row.get("expert_choices"))

            def loss(output):
                logprobs.append(output[0].detach().clone())
                return -output[0].sum() * (len(mine) * parallel.dp_size), {}

            return output, loss

        parity_ranks.backward(chunks, forward, mine)
        grads = parity_ranks.gradients_of(source, [p for chunk in chunks for p in chunk.parameters()])
    return {"logprobs": torch.stack(logprobs) if logprobs else None, "grads": grads}

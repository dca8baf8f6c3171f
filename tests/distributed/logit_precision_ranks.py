"""What the tests of HF parity and of the head's precision compute on each rank."""

import os

import policy_rows
import torch
from parity_ranks import recipe
from random_policies import rows


def full_logits(jobs):
    """For (name, policy path, layout): logits [N, vocab] of the first fixed row, and the model's log-probs."""
    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.trainer.ranks import init_parallel

    found = {}
    for name, path, layout in jobs:
        settings = recipe(path, int(os.environ["WORLD_SIZE"]), layout)
        parallel = init_parallel(settings)
        chunks = build_policy(path, settings, parallel)
        row = rows()[0]
        with torch.no_grad():
            pair = chunks[0](**policy_rows.arguments(chunks[0], row))
        found[name] = (policy_rows.full_logits(chunks[0], row), pair)
        shutdown_parallel(keep_world=True)
    return found

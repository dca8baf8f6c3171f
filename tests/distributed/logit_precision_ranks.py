"""What the tests of HF parity and of the head's precision compute on each rank."""

import policy_rows
import torch
from parity_ranks import built
from random_policies import rows


def full_logits(jobs):
    """For (name, policy path, layout): logits [N, vocab] of the first fixed row, and the model's log-probs."""
    found, row = {}, rows()[0]
    for name, path, layout in jobs:
        with built(path, layout) as (chunks, _, _), torch.no_grad():
            pair = chunks[0](**policy_rows.arguments(chunks[0], row))
            found[name] = (policy_rows.full_logits(chunks[0], row), pair)
    return found

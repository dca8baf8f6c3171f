"""What an optimizer's step writes, and records."""

import torch

from megatron_scalerl.weights.changes import bits_of, find


def write(written, shard, new, chunk=500):
    """What a step does: every chunk compared and written."""
    for first in range(0, shard.numel(), chunk):
        old = shard.view(-1)[first : first + chunk]
        found = find(bits_of(old), new.view(-1)[first : first + chunk])
        written.add(shard.view(-1), first, found)


def stepped(values, share, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(values.shape, generator=g) < share, values + 1, values)

"""The whole weights of a trainer, put together from the parts that its ranks would send."""

import torch
import torch.distributed as dist


def gathered(source):
    """Name -> Hugging Face tensor on rank 0, nothing on other ranks; collective."""
    plan, me = source.plan, source.parallel.rank
    source.begin()
    own = {n: source.read(n).clone().cpu() for n, part in enumerate(plan.parts) if part.sender == source.sender}
    of_ranks = [None] * dist.get_world_size() if me == 0 else None
    dist.gather_object(own, of_ranks)
    if of_ranks is None:
        return {}
    found = {m.name: torch.empty(m.shape, dtype=getattr(torch, m.dtype)) for m in plan.parameters}
    for parts in of_ranks:
        for number, values in parts.items():
            part = plan.parts[number]
            found[plan.parameters[part.tensor].name][tuple(slice(a, b) for a, b in part.ranges)] = values
    return found

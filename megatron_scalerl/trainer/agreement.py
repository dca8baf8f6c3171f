"""A check on the host, once at the start of a step, that ranks hold the same batch.

The ranks compare the received batches before the device gets any work. A comparison in the logit projection would
have to read from the device for every micro-batch.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron_scalerl.distributed.parallel import Parallel
from megatron_scalerl.types import MicroBatch


def check_tokens(micro_batches: Sequence[MicroBatch], vocab_size: int) -> None:
    """Raises ValueError for a token, or a target with loss, outside the vocabulary.

    On a GPU a kernel would end the process at such an id, without naming the position.
    """
    for number, m in enumerate(micro_batches):
        for name, places in (("tokens", np.arange(len(m.tokens))), ("targets", np.flatnonzero(m.loss_mask))):
            ids = getattr(m, name)[places]
            outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if len(outside):
                raise ValueError(
                    f"micro-batch {number}: {name}: id {ids[outside[0]]} at position {places[outside[0]]} is outside "
                    f"the vocabulary of {vocab_size} ids (the first of {len(outside)} invalid ids)"
                )


def agree(micro_batches: Sequence[MicroBatch], parallel: Parallel, *, step: int) -> None:
    """Raises RuntimeError on all ranks if ranks with the same data-parallel rank hold different micro-batches.

    Raises the same error if steps or numbers of micro-batches differ between any ranks, because the ranks would wait
    for each other forever.
    """
    if parallel.world_size == 1:
        return
    facts = [parallel.dp_rank, step, len(micro_batches), _digest(micro_batches)]
    own_facts = torch.tensor(facts, dtype=torch.int64, device=parallel.device)
    gathered = own_facts.new_empty((parallel.world_size, len(facts)))
    dist.all_gather_into_tensor(gathered.view(-1), own_facts)
    facts_of_ranks = gathered.tolist()
    first_of: dict[int, tuple[int, int]] = {}
    for rank, (dp_rank, rank_step, count, digest) in enumerate(facts_of_ranks):
        if [rank_step, count] != facts_of_ranks[0][1:3]:
            raise RuntimeError(
                f"rank {rank} has {count} micro-batches for step {rank_step}, but rank 0 has {facts_of_ranks[0][2]} "
                f"for step {facts_of_ranks[0][1]}; both numbers have to be equal on all ranks"
            )
        first_digest, first_rank = first_of.setdefault(dp_rank, (digest, rank))
        if digest != first_digest:
            raise RuntimeError(
                f"rank {rank} and rank {first_rank} have different batches, but both are data-parallel rank {dp_rank}"
            )


def _digest(micro_batches: Sequence[MicroBatch]) -> int:
    """A 63-bit digest of all arrays, including their types and shapes."""
    digest = xxhash.xxh3_64()
    for m in micro_batches:
        for field in fields(m):
            array = getattr(m, field.name)
            if array is not None:
                digest.update(f"{field.name} {array.dtype} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
    # Collectives exchange int64, which holds 63 bits and a sign.
    return digest.intdigest() >> 1

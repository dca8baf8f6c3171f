"""How fast the trainer's ranks exchange data, measured once before the first step."""

from __future__ import annotations

import logging
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.parallel import Parallel

logger = logging.getLogger(__name__)

BYTES = 32 << 20
"""Of each measured transfer: large enough for bandwidth to decide, not latency."""
ROUNDS = 5
_NAME_BYTES = 64
_NAMED = 3
"""Links that an error names."""


def check_bandwidth(parallel: Parallel, floor_gb_s: float) -> float:
    """Bus bandwidth (GB/s) of an all-reduce of 32 MiB over all ranks; every rank calls it and gets the same value.

    Bus bandwidth is 2 (n - 1) / n times the bytes over the seconds, so that it compares with the adapters' of a node
    whatever the number n of ranks (as NVIDIA's nccl-tests reckon). The median of ROUNDS, after one that connects.
    Raises RuntimeError on every rank below `floor_gb_s`, with the slowest links between hosts. Infinite for one rank.
    """
    if parallel.world_size == 1:
        return math.inf
    data = torch.ones(BYTES // 4, dtype=torch.float32, device=parallel.device)
    dist.all_reduce(data)
    seconds = []
    for _ in range(ROUNDS):
        data.fill_(1)
        seconds.append(_seconds(partial(dist.all_reduce, data)))
    slowest = torch.tensor([statistics.median(seconds)], dtype=torch.float32, device=parallel.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    n = parallel.world_size
    found = 2 * (n - 1) / n * BYTES / slowest.item() / 1e9
    logger.info("all-reduce over %d ranks: %.3g GB/s", n, found)
    if found < floor_gb_s:
        raise RuntimeError(
            f"trainer.min_all_reduce_gb_s: expected at least {floor_gb_s:g} GB/s over {n} ranks, found {found:.3g}; "
            f"slowest links: {_slowest_links(parallel, data)}"
        )
    return found


def _seconds(transfer: Callable[[], object]) -> float:
    """Seconds of one transfer that all ranks begin together."""
    device.synchronize()
    dist.barrier()
    began = time.perf_counter()
    transfer()
    device.synchronize()
    return time.perf_counter() - began


def _slowest_links(parallel: Parallel, data: torch.Tensor) -> str:
    """The slowest links of a ring over one rank of each host (over all ranks of one host), one after the other."""
    names = _host_names(parallel)
    ring = [rank for rank, name in enumerate(names) if name not in names[:rank]]
    if len(ring) == 1:
        ring = list(range(parallel.world_size))
    links = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    rates = torch.zeros(len(links), dtype=torch.float32, device=parallel.device)
    for number, (sender, receiver) in enumerate(links):
        for measured in (False, True):  # the first opens the connection
            seconds = _seconds(partial(_send, parallel, data, sender, receiver))
            if measured and parallel.rank == receiver:
                rates[number] = BYTES / seconds / 1e9
    dist.all_reduce(rates)
    worst = sorted(zip(rates.tolist(), links, strict=True))[:_NAMED]
    return ", ".join(
        f"rank {sender} ({names[sender]}) to rank {receiver} ({names[receiver]}) {rate:.3g} GB/s"
        for rate, (sender, receiver) in worst
    )


def _send(parallel: Parallel, data: torch.Tensor, sender: int, receiver: int) -> None:
    if parallel.rank == sender:
        dist.send(data, receiver)
    elif parallel.rank == receiver:
        dist.recv(data, sender)


def _host_names(parallel: Parallel) -> Sequence[str]:
    """Host name of every rank."""
    name = socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
    own = torch.tensor(list(name), dtype=torch.uint8, device=parallel.device)
    all_names = [torch.empty_like(own) for _ in range(parallel.world_size)]
    dist.all_gather(all_names, own)
    return [bytes(each.tolist()).decode(errors="replace").strip() for each in all_names]

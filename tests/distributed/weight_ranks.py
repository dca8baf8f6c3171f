"""What each rank does for the tests of weight updates: send its parts over gloo, to workers in rank 0's threads."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_ranks import recipe
from worker_needs import needs_of_worker

from megatron_scalerl.weights.changes import Changes, bits_of
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.plan import WeightPlan
from megatron_scalerl.weights.transport.frames import receive
from megatron_scalerl.weights.transport.gloo import Group

VERSIONS = 3
Received = dict[str, torch.Tensor]


class Worker:
    """Receives updates; NaN where it has received nothing."""

    def __init__(self, plan: WeightPlan, shard: int, connection: Connection) -> None:
        self.plan, self.version, self.changed = plan.of_shard(shard), None, 0
        self.groups = {sender: Group(connection, 1, sender, shard) for sender, _ in sorted(self.plan.pairs)}
        self.held = {m.name: torch.full(m.shape, float("nan")) for m in plan.parameters}

    def take(self, version: int) -> Received:
        """A copy of all tensors after an update."""
        for part in receive(self.groups, self.plan, version, holds=self.version):
            here = self.held[self.plan.parameters[part.tensor].name][tuple(slice(a, b) for a, b in part.ranges)]
            if isinstance(part, Changes):
                flat = here.reshape(-1).clone()
                flat[part.positions] = part.bits(bits_of(flat)[part.positions]).view(flat.dtype)
                here.copy_(flat.view(here.shape))
                self.changed += part.positions.numel()
            else:
                here.copy_(part.values)
        self.version = version
        return {name: values.clone() for name, values in self.held.items()}


def step(values: torch.Tensor) -> None:
    """Change about one element in fifty, by its bits alone: the same elements in every layout."""
    bits = bits_of(values)
    bits += bits % 50 == 7


def updates(
    jobs: list[tuple[str, dict[str, Any], int]], rendezvous: Any
) -> list[tuple[list[list[Received]], int, int]]:
    """For each (Hugging Face folder, layout, workers of the engine): ([versions][workers] tensors, senders, elements
    that arrived as changes), from rank 0."""
    return [_update(path, layout, workers, rendezvous) for path, layout, workers in jobs]


def _update(path: str, layout: dict[str, Any], workers: int, rendezvous: Any) -> Any:
    from megatron.core import parallel_state

    from megatron_scalerl.distributed.parallel import init_parallel
    from megatron_scalerl.trainer.model import build_policy
    from megatron_scalerl.weights.sending import WeightSending
    from megatron_scalerl.weights.source import MegatronWeightSource

    settings = recipe(path, int(os.environ["WORLD_SIZE"]), layout)
    parallel = init_parallel(settings)
    chunks = build_policy(path, settings, parallel)
    source = MegatronWeightSource(chunks, parallel, most_senders=4)
    plan = source.plan_for([needs_of_worker(source.manifest, worker, workers) for worker in range(workers)])
    connection = Connection(
        backend="gloo",
        rendezvous=rendezvous,
        group=_agreed(uuid.uuid4().int >> 66),
        world_sizes=(2,) * workers,
        bucket_mib=1,
        timeout_s=120,
        connect_timeout_s=120,
        deltas="absolute",
    )
    sending, found = WeightSending(source, bucket_mib=1), []
    with ThreadPoolExecutor(workers) as pool:
        joining = _on_rank_0(pool, [partial(Worker, plan, n, connection) for n in range(workers)])
        assert sending.connect(connection) == ""
        ends = [each.result() for each in joining]
        for version in range(VERSIONS):
            taking = _on_rank_0(pool, [partial(end.take, version) for end in ends])
            report = sending.send(version)
            assert not report.failure and report.bytes <= report.whole_bytes
            found.append([each.result() for each in taking])
            for chunk in chunks:
                for parameter in chunk.parameters():
                    step(parameter.data)
        for group in (group for end in ends for group in end.groups.values()):
            group.close()
    sending.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return found, plan.senders, sum(end.changed for end in ends)


def _on_rank_0(pool: ThreadPoolExecutor, calls: list[Any]) -> list[Future[Any]]:
    return [pool.submit(call) for call in calls] if dist.get_rank() == 0 else []


def _agreed(number: int) -> str:
    """Rank 0's number, on all ranks."""
    found = torch.tensor(number)
    dist.broadcast(found, 0)
    return f"layouts-{int(found)}"

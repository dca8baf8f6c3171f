"""What each rank does for the tests of weight updates: send its parts over gloo, to workers in rank 0's threads."""

import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_ranks import built
from worker_needs import needs_of_worker

from megatron_scalerl.weights.changes import Changes, bits_of
from megatron_scalerl.weights.plan import Connection, buckets
from megatron_scalerl.weights.transport.frames import receive
from megatron_scalerl.weights.transport.gloo import Group

VERSIONS = 3


class Worker:
    """Receives updates; NaN where it has received nothing."""

    def __init__(self, plan, shard, connection):
        self.plan, self.version, self.changed = plan.of_shard(shard), None, 0
        self.groups = {sender: Group(connection, 1, sender, shard) for sender, _ in sorted(self.plan.pairs)}
        self.held = {
            m.name: torch.full(m.shape, float("nan"), dtype=getattr(torch, m.dtype)) for m in plan.parameters
        }

    def take(self, version):
        """A copy of all tensors after an update."""
        received = receive(self.groups, self.plan, version, [], held_version=self.version)
        for part in (each for of in received for each in (of if isinstance(of, list) else [of])):
            here = self.held[self.plan.parameters[part.tensor].name][tuple(slice(a, b) for a, b in part.ranges)]
            if isinstance(part, Changes):
                flat = here.reshape(-1).clone()
                flat[part.positions] = part.values
                here.copy_(flat.view(here.shape))
                self.changed += part.positions.numel()
            else:
                here.copy_(part.values)
        self.version = version
        return {name: values.clone() for name, values in self.held.items()}


def step(values):
    """Change about one element in fifty, by its bits alone: the same elements in every layout."""
    bits = bits_of(values)
    bits += bits % 50 == 7


def updates(jobs, rendezvous):
    """For each (Hugging Face folder, layout, workers of the engine): ([versions][workers] tensors, senders, elements
    that arrived as changes), from rank 0, and bytes of the copies that this rank compares with."""
    found = []
    for path, layout, workers in jobs:
        with _connected(path, layout, workers, rendezvous) as sides:
            versions = []
            for version in range(VERSIONS):
                report, taken = sides.update(version)
                assert not report.failure and report.bytes <= report.whole_bytes
                versions.append(taken)
            sender, changed = sides.sending._sender, sum(end.changed for end in sides.ends)
            kept = 0 if sender is None else sum(copy.nbytes for copy in sender._copies.values())
            found.append((versions, sides.source.plan.senders, changed, kept))
    return found


def carried(jobs, rendezvous):
    """The same updates: bytes of the tensors that each group was given on this rank, as sender and as receiver."""
    start, found = Group.start, []

    def counting(group, tensor):
        group.carried = getattr(group, "carried", 0) + tensor.nbytes
        return start(group, tensor)

    Group.start = counting  # type: ignore[method-assign]
    for path, layout, workers in jobs:
        with _connected(path, layout, workers, rendezvous) as sides:
            versions = []
            for version in range(VERSIONS):
                report, _ = sides.update(version)
                sender = sides.sending._sender
                groups = {} if sender is None else sender.groups
                versions.append(
                    {
                        "report": report,
                        "sizes": [] if sender is None else list(sender.sizes),
                        "sent": {shard: _taken(group) for shard, group in groups.items()},
                        "received": [{n: _taken(group) for n, group in end.groups.items()} for end in sides.ends],
                    }
                )
            order = [(bucket.sender, bucket.shard, bucket.nbytes) for bucket in buckets(sides.source.plan, 1)]
            found.append({"sender": sides.source.sender, "buckets": order, "versions": versions})
    return found


def _taken(group):
    count, group.carried = group.carried, 0
    return int(count)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """This rank's sending side, and on rank 0 the workers of an engine."""

    chunks: Any
    optimizer: Any
    changes: Any
    source: Any
    sending: Any
    ends: list[Worker]
    pool: ThreadPoolExecutor

    def update(self, version):
        """Send, take, and make a step; what the workers hold after it."""
        taking = [self.pool.submit(end.take, version) for end in self.ends]
        report = self.sending.send(version)
        taken = [each.result() for each in taking]
        self._step()
        return report, taken

    def _step(self):
        """In bf16 as an optimizer does: fp32 main weights, which Megatron rounds into the parameters."""
        if self.optimizer is None:
            for parameter in (each for chunk in self.chunks for each in chunk.parameters()):
                step(parameter.data)
            return
        from megatron_scalerl.trainer.optimizer import parts_of

        self.changes.begin()
        for part in parts_of(self.optimizer):
            for held, main in zip(*part._get_model_and_main_params_data_float16()):
                stepped = held.clone()
                step(stepped)
                main.copy_(stepped)
            part._copy_main_params_to_model_params()
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


@contextlib.contextmanager
def _connected(path, layout, workers, rendezvous):
    from megatron_scalerl.trainer import changes_gather
    from megatron_scalerl.trainer.optimizer import build_optimizer
    from megatron_scalerl.trainer.weight_changes import WeightChanges
    from megatron_scalerl.weights.sending import WeightSending
    from megatron_scalerl.weights.source import MegatronWeightSource

    layout = dict(layout)
    most_senders = layout.pop("most_senders", 4)
    with built(path, layout) as (chunks, parallel, settings):
        changes_gather.WINDOW = 1000  # so that there are several
        optimizer = build_optimizer(chunks, settings) if settings.policy.dtype == "bfloat16" else None
        changes = WeightChanges(optimizer, parallel.device) if optimizer else None
        source = MegatronWeightSource(chunks, parallel, most_senders=most_senders)
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
        sending = WeightSending(source, bucket_mib=1, change_record=changes.written if changes else None)
        with ThreadPoolExecutor(workers) as pool:
            joining = _on_rank_0(pool, [partial(Worker, plan, n, connection) for n in range(workers)])
            assert sending.connect(connection) == ""
            ends = [each.result() for each in joining]
            yield Sides(
                chunks=chunks,
                optimizer=optimizer,
                changes=changes,
                source=source,
                sending=sending,
                ends=ends,
                pool=pool,
            )
            for group in (group for end in ends for group in end.groups.values()):
                group.close()
        sending.close()


def _on_rank_0(pool, calls):
    return [pool.submit(call) for call in calls] if dist.get_rank() == 0 else []


def _agreed(number):
    """Rank 0's number, on all ranks."""
    found = torch.tensor(number)
    dist.broadcast(found, 0)
    return f"layouts-{int(found)}"

"""Tensors, their plan, and groups of threads that send and receive them."""

from concurrent.futures import ThreadPoolExecutor

import torch
from worker_needs import whole_plan

from megatron_scalerl.weights.changes import Changes
from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import manifest_of
from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.transport.frames import receive
from megatron_scalerl.weights.transport.gloo import Group
from megatron_scalerl.weights.transport.shm import ShmGroup

KINDS = {"gloo": Group, "shm": ShmGroup}


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=g),
        "b": torch.randn(300_000, generator=g).bfloat16(),
        "scalar": torch.tensor(2.5),
        "c": torch.randn(400, 1000, generator=g).t(),  # not contiguous, beyond one bucket
    }


def manifest(weights):
    return manifest_of((n, str(t.dtype).removeprefix("torch."), t.shape) for n, t in weights.items())


def plan_of(weights):
    return whole_plan(manifest(weights))


def reader(weights, plan):
    """Reads the parts of a plan from whole tensors."""

    def read(number):
        part = plan.parts[number]
        return weights[plan.parameters[part.tensor].name][tuple(slice(a, b) for a, b in part.ranges)]

    return read


def joined(connection, receivers=1, senders=1):
    """(senders, the groups of each receiver)"""

    def join(rank):
        return {sender: KINDS[connection.backend](connection, rank, sender) for sender in range(senders)}

    with ThreadPoolExecutor(receivers + senders) as pool:
        ends = [pool.submit(make_sender, connection, number) for number in range(senders)]
        groups = [pool.submit(join, rank + 1) for rank in range(receivers)]
        return [end.result() for end in ends], [g.result() for g in groups]


def or_leaves(groups, receiving):
    """What a receiver makes of an update; where it refuses it, it leaves, which the senders notice at once.

    The error has no frames: a broadcast that is pending in one would keep its connection open.
    """
    try:
        return receiving()
    except RuntimeError as error:
        why = str(error)
    for group in groups.values():
        group.close()
    raise RuntimeError(why)


class Held:
    """What a receiver has, written part by part as an engine would."""

    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(tensor).contiguous() for name, tensor in weights.items()}
        self.version, self.kinds = None, []

    def take(self, groups, plan, version):
        digests, self.kinds = [], []
        or_leaves(
            groups, lambda: self._write(plan, receive(groups, plan, version, digests, held_version=self.version))
        )
        self.version = version
        return digests

    def _write(self, plan, parts):
        for part in (each for of in parts for each in (of if isinstance(of, list) else [of])):
            self.kinds.append(type(part).__name__)
            tensor = self.weights[plan.parameters[part.tensor].name]
            cut = tensor[tuple(slice(a, b) for a, b in part.ranges)]
            if isinstance(part, Changes):
                flat = cut.contiguous().view(-1)
                flat[part.positions] = part.values
                cut.copy_(flat.view(cut.shape))
            else:
                cut.copy_(part.values)


def update(senders, receivers, held, weights, version, written=None):
    """Each sender's digests, each receiver's; or their errors."""
    plan = plan_of(weights)
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(sender.send, plan, reader(weights, plan), version, written) for sender in senders]
        taken = [pool.submit(each.take, groups, plan, version) for each, groups in zip(held, receivers)]
        return [f.exception() or f.result() for f in (*sent, *taken)]


def digest_of(weights):
    parts = [
        value_digest(tensor, number, range(tensor.dim()), [range(size) for size in tensor.shape])
        for number, tensor in enumerate(weights.values())
    ]
    return total(parts)


def stepped(weights, seed, share=0.01):
    """The weights after a step that changes a share of `b` and `c`, and nothing else."""
    g = torch.Generator().manual_seed(seed)
    found = dict(weights)
    for name in ("b", "c"):
        flat = weights[name].contiguous().view(-1).clone()
        places = (torch.rand(flat.shape, generator=g) < share).nonzero().flatten()
        flat[places] += flat[places].abs() * 0.01 + 1e-3
        found[name] = flat.view(weights[name].shape)
    return found


def flip(sender, byte):
    """A bit of each bucket changes after its digest was taken."""
    ship = sender._ship

    def faulty(shard, packed):
        packed[byte] ^= 4
        return ship(shard, packed)

    sender._ship = faulty


def equal(held, weights):
    return all(torch.equal(held.weights[name], tensor) for name, tensor in weights.items())

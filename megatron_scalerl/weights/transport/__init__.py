"""Weight transfer from the trainer to the engines, the trainer's side: torch only, never vLLM.

Life of a sender: `make_sender` creates the sender once from a Connection, `Sender.send` sends every update,
`Sender.close` leaves the groups. gloo serves CPUs, shared memory serves CPUs of one host, NCCL serves GPUs. Over each
backend, a sending rank of the trainer has a broadcast group for each shard of the weights. The sender is the group's
rank 0; the workers of all engines that need this shard follow.

Who can join: the engines get the rendezvous over the HTTP interface, which requires the run's secret, and on one
host only this user can enter the rendezvous folder (`rendezvous`). The members do not authenticate each other. A
stranger who could join would read the weights; weights sent to an engine by a stranger would be detected, since
`WeightSync` compares, over HTTP again, the digest of each engine's values with the digest of the trainer's values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_scalerl.distributed.rendezvous import FolderRendezvous, Rendezvous
from megatron_scalerl.weights.plan import Connection

if TYPE_CHECKING:
    from megatron_scalerl.weights.transport.gloo import Group
    from megatron_scalerl.weights.transport.sender import Sender


def make_sender(connection: Connection, number: int = 0, shards: Iterable[int] = (0,)) -> Sender:
    """Create the groups of sender `number` and these shards as rank 0, and wait for all engines to join.

    Raises ValueError for an unknown backend, RuntimeError if the engines do not join in time.
    """
    from megatron_scalerl.weights.transport.sender import Sender

    kind = _group_class(connection)
    sender = Sender({}, number, connection)
    try:
        for shard in sorted(shards):
            sender.groups[shard] = kind(connection, 0, number, shard)
    except BaseException:
        sender.close()
        raise
    return sender


def join_sender(connection: Connection, rank: int, sender: int, shard: int) -> Group:
    """Join the group of a sender and a shard as a receiver.

    Raises ValueError for an unknown backend, RuntimeError where the group is not formed in time.
    """
    return _group_class(connection)(connection, rank, sender, shard)


def _group_class(connection: Connection) -> type[Group]:
    from megatron_scalerl.weights.transport import gloo, shm

    classes = {"gloo": gloo.Group, "nccl": gloo.NcclGroup, "shm": shm.ShmGroup}
    if connection.backend not in classes:
        raise ValueError(f"weights.transport: expected one of {sorted(classes)}, found {connection.backend!r}")
    return classes[connection.backend]


def resolve_transport(name: str, rendezvous: Rendezvous | None = None, *, colocated: bool = False) -> str:
    """gloo, nccl or shm for the recipe's weights.transport.

    `auto` is the backend of the trainer's collectives, and shm instead of gloo where all processes are on one host.
    colocated: trainer and engines share devices, on which NCCL refuses two processes.
    """
    if name != "auto":
        return name
    from megatron_scalerl.distributed import device

    if not colocated and device.backend() == "nccl":
        return "nccl"
    return "shm" if isinstance(rendezvous, FolderRendezvous) else "gloo"

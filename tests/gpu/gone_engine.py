"""One side of a weight update in which an engine is killed: python gone_engine.py ROLE FOLDER, ROLE sender, gone or
next. The sender has a default group, as a rank of the trainer."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from worker_needs import whole_plan

from megatron_scalerl.distributed import device
from megatron_scalerl.distributed.rendezvous import FolderRendezvous, use_interface
from megatron_scalerl.weights.plan import Connection, manifest_of
from megatron_scalerl.weights.transport import join_sender, make_sender
from megatron_scalerl.weights.transport.frames import assembled_tensors, receive

ELEMENTS = 16 << 20
"""64 MiB: more than sockets hold."""


def connection(group, folder):
    meeting, here = FolderRendezvous(folder=folder), device.backend()
    return Connection(
        backend=here,
        rendezvous=meeting,
        group=group,
        world_sizes=(2,),
        bucket_mib=64,
        timeout_s=10.0,
        connect_timeout_s=240.0,
    )


def plan():
    return whole_plan(manifest_of([("a", "float32", (ELEMENTS,))]))


def send(folder):
    """To an engine that is killed in the middle, then to the next one."""
    dist.init_process_group(device.backend(), init_method=f"file://{folder}/trainer", rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device=device.device()))
    weights = torch.arange(ELEMENTS, dtype=torch.float32, device=device.device())
    read = lambda part: weights  # noqa: E731
    sender = make_sender(connection("gone", folder))
    try:
        sender.send(plan(), read, 1)
    except RuntimeError:
        print("failed", flush=True)
    make_sender(connection("next", folder)).send(plan(), read, 1)
    dist.all_reduce(weights)
    print("sent", flush=True)
    sys.stdin.readline()


def take(group, folder):
    """As an engine."""
    joined = join_sender(connection(group, folder), 1, 0, 0)
    if group == "gone":
        joined.broadcast(torch.zeros(5, dtype=torch.int64, device=joined.device))  # the header
        os.kill(os.getpid(), signal.SIGKILL)
    [(_, weights)] = assembled_tensors(receive({0: joined}, plan(), 1, []), plan())
    assert torch.equal(weights.cpu(), torch.arange(ELEMENTS, dtype=torch.float32))


if __name__ == "__main__":
    device.prepare(threads=1, deterministic=False)
    use_interface(FolderRendezvous(folder=sys.argv[2]))
    send(sys.argv[2]) if sys.argv[1] == "sender" else take(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # without the destructors of groups

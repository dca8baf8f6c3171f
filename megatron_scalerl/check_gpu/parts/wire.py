"""Part wire: the weight transport on one device: digests, packing, sending, a tensor shared between processes.

NCCL does not support two ranks on one GPU, so nothing is received over it; the part `parallel` does that with two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting
from megatron_scalerl.distributed import device as seam
from megatron_scalerl.distributed.rendezvous import private_folder, use_interface
from megatron_scalerl.processes.isolated import FAILED, SendEvent, events
from megatron_scalerl.weights.digest import digest, value_digest
from megatron_scalerl.weights.plan import Connection, buckets, manifest_of, whole
from megatron_scalerl.weights.transport import make_sender

_BUCKET_MIB = 64
_ANSWER_S = 120.0
"""Time limit for the other process to import torch, open the handle and answer; its end is noticed at once."""

Handle = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""How another process opens a tensor: a function of PyTorch and its arguments."""


def shared_handle(tensor: torch.Tensor) -> Handle:
    """A handle of the tensor for one other process, valid while this one keeps the tensor. Raises driver errors."""
    found: Handle = reduce_tensor(tensor)
    return found


def read_sum(handle: Handle, send: SendEvent) -> None:
    """Runs in the other process: sends the sum of the tensor; `isolated.events` reports exceptions."""
    rebuild, arguments = handle
    send({"sum": float(rebuild(*arguments).double().sum())})


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    device = seam.device()
    with record.guarded("digest"):
        _digest(record, device)
    with record.guarded("send"):
        _send(record, device, matrices=2 if setting.toy else 64, width=256 if setting.toy else 4096)
    with record.guarded("tensor between processes"):
        _shared(record, device)


def _digest(record: Recorder, device: torch.device) -> None:
    """Digests of less than a chunk, one chunk, and several chunks with a remainder (8 MiB each)."""
    generator = torch.Generator().manual_seed(1)
    for size in (8, 8 << 20, (20 << 20) + 64):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        on_device, on_cpu = digest(data.to(device)), digest(data)
        if on_device != on_cpu:
            text = f"{size} bytes: expected {on_cpu:016x} as on the CPU, found {on_device:016x} on {device.type}"
            return record.holds("digest", False, text)
    values = torch.randn(300, 7, 500, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        part, along = values.to(dtype).transpose(0, 2), (range(500), range(7), range(300))
        on_device, on_cpu = (value_digest(each, 1, (2, 1, 0), along) for each in (part.to(device), part))
        if on_device != on_cpu:
            text = f"values of {dtype}: expected {on_cpu:016x} as on the CPU, found {on_device:016x} on {device.type}"
            return record.holds("digest", False, text)
    record.holds("digest", True, f"{device.type} equals CPU on 8 bytes to 20 MiB, and on values")
    return None


def _send(record: Recorder, device: torch.device, *, matrices: int, width: int) -> None:
    """Three updates sent by rank 0 to a group of one: header, packing, digest, broadcast."""
    generator = torch.Generator(device).manual_seed(2)
    tensors = [
        torch.randn(width, width, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(matrices)
    ]
    plan = whole(manifest_of((f"w{n}", "bfloat16", t.shape) for n, t in enumerate(tensors)))
    size = sum(bucket.nbytes for bucket in buckets(plan, _BUCKET_MIB))
    seconds, digests = [], set()
    with private_folder() as rendezvous:
        use_interface(rendezvous)  # before the first group, so that gloo and NCCL listen on loopback only
        sender = make_sender(
            Connection(
                backend=seam.backend(),
                rendezvous=rendezvous,
                group="check",
                world_sizes=(1,),
                bucket_mib=_BUCKET_MIB,
                timeout_s=30.0,
                connect_timeout_s=30.0,
            )
        )
        for version in (1, 2, 3):
            begin = time.perf_counter()
            sender.send(plan, tensors.__getitem__, version)
            digests.add(sender.values[0])  # the wire's have the version
            seconds.append(time.perf_counter() - begin)
        sender.close()
    same = len(digests) == 1
    text = f"{seam.backend()}, {len(seconds)} updates of {size} bytes, digests {'equal' if same else 'differ'}"
    if not same:
        return record.holds("send", False, text)
    record.measured("send", size / 2**30 / min(seconds), "GiB/s", detail=text, data={"seconds": seconds})
    return None


def _shared(record: Recorder, device: torch.device, read: Callable[..., None] = read_sum) -> None:
    """Another process reads a tensor of this one: a CUDA IPC handle on a GPU, shared memory on a CPU."""
    tensor = torch.arange(1 << 16, device=device, dtype=torch.float32)
    expected = float(tensor.double().sum())
    received = list(events(read, shared_handle(tensor), start="spawn", silence_timeout_s=_ANSWER_S))
    found = next((event["sum"] for event in received if "sum" in event), None)
    why = next((event[FAILED] for event in received if FAILED in event), "")
    text = f"{device.type}: expected the sum {expected:g}, found {found}"
    record.holds("tensor between processes", found == expected and not why, f"{text}; {why}" if why else text)

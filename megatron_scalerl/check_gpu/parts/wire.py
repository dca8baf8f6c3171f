"""What of the weight transport one device can show: digests, packing and sending, a tensor shared between processes.

NCCL refuses two ranks on one GPU, so nothing is received over it here; the part `parallel` does that with two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.setting import Setting
from megatron_scalerl.check_gpu.wire_reader import handed, read_sum
from megatron_scalerl.checkpoints.manifest import ParamMeta
from megatron_scalerl.distributed import device as seam
from megatron_scalerl.distributed.rendezvous import private_folder, use_interface
from megatron_scalerl.processes.isolated import FAILED, events
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.digest import digest
from megatron_scalerl.weights.transport import make_sender

_BUCKET_MIB = 64
_ANSWER_S = 20.0
"""For the other process to import torch, to open the handle and to answer; its death is noticed at once."""


def run(setting: Setting, record: Recorder) -> None:
    """Report the part's checks."""
    device = seam.device()
    with record.guarded("digest"):
        _digest(record, device)
    with record.guarded("send"):
        _send(record, device, matrices=2 if setting.toy else 64, width=256 if setting.toy else 4096)
    with record.guarded("tensor between processes"):
        _shared(record, device)


def _digest(record: Recorder, device: torch.device) -> None:
    """Bytes of every length class of the digest: part of a chunk, one, several with a rest (8 MiB each)."""
    generator = torch.Generator().manual_seed(1)
    for size in (8, 8 << 20, (20 << 20) + 64):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        on_device, on_cpu = digest(data.to(device)), digest(data)
        if on_device != on_cpu:
            text = f"{size} bytes: expected {on_cpu:016x} as on the CPU, found {on_device:016x} on {device.type}"
            return record.holds("digest", False, text)
    record.holds("digest", True, f"{device.type} equals CPU on 8 bytes to 20 MiB")
    return None


def _send(record: Recorder, device: torch.device, *, matrices: int, width: int) -> None:
    """Three updates to a group of one, as rank 0 sends them: header, packing, digest, broadcast."""
    generator = torch.Generator(device).manual_seed(2)
    tensors = {
        f"w{i}": torch.randn(width, width, device=device, dtype=torch.bfloat16, generator=generator)
        for i in range(matrices)
    }
    manifest = tuple(ParamMeta(name=n, dtype="bfloat16", shape=tuple(t.shape)) for n, t in tensors.items())
    with private_folder() as rendezvous:
        use_interface(rendezvous)  # before the first group: gloo and NCCL listen on loopback only
        sender = make_sender(
            Connection(
                backend=seam.backend(),
                rendezvous=rendezvous,
                group="check",
                world_size=1,
                bucket_mib=_BUCKET_MIB,
                timeout_s=30.0,
            )
        )
        reports = [sender.send(iter(tensors.items()), manifest, version) for version in (1, 2, 3)]
        sender.close()
    same = len({report.digest for report in reports}) == 1
    seconds = min(report.seconds for report in reports)
    rate = reports[0].bytes / 2**30 / seconds
    digests = "equal" if same else "differ"
    text = f"{seam.backend()}, {len(reports)} updates of {reports[0].bytes} bytes, digests {digests}"
    if not same:
        return record.holds("send", False, text)
    record.measured("send", rate, "GiB/s", detail=text, data={"seconds": [r.seconds for r in reports]})
    return None


def _shared(record: Recorder, device: torch.device, read: Callable[..., None] = read_sum) -> None:
    """Another process reads a tensor of this one: a CUDA IPC handle on a GPU, shared memory on a CPU."""
    tensor = torch.arange(1 << 16, device=device, dtype=torch.float32)
    expected = float(tensor.double().sum())
    told = list(events(read, handed(tensor), start="spawn", silence_timeout_s=_ANSWER_S))
    found = next((event["sum"] for event in told if "sum" in event), None)
    why = next((event[FAILED] for event in told if FAILED in event), "")
    text = f"{device.type}: expected the sum {expected:g}, found {found}"
    record.holds("tensor between processes", found == expected and not why, f"{text}; {why}" if why else text)

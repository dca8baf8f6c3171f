"""Device memory of this process: allocated and reserved by PyTorch, free on the device, and peaks.

Without a GPU the resident set replaces all of them, so that the same code can be rehearsed.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_scalerl.check_gpu.probe import nvidia_smi
from megatron_scalerl.distributed import device


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes. Produced by `memory`."""

    allocated: int
    """By tensors."""
    reserved: int
    """By PyTorch's caching allocator, free blocks included."""
    peak_allocated: int
    """Since `reset_peaks`."""
    peak_reserved: int
    """Since `reset_peaks`."""
    used: int
    """On the whole device by all processes."""
    total: int
    """Capacity of the device."""

    @property
    def free(self) -> int:
        """Free on the device."""
        return self.total - self.used


def memory() -> DeviceMemory:
    """Current memory, after all work queued on the device has finished."""
    if not device.HAVE_GPU:
        now, peak = _resident("VmRSS"), _resident("VmHWM")
        total = int(next(line for line in _lines("/proc/meminfo") if line.startswith("MemTotal:")).split()[1]) * 1024
        return DeviceMemory(
            allocated=now, reserved=now, peak_allocated=peak, peak_reserved=peak, used=now, total=total
        )
    device.synchronize()
    place = device.device()
    gpu = torch.get_device_module(place)
    free, total = gpu.mem_get_info(place)
    return DeviceMemory(
        allocated=gpu.memory_allocated(place),
        reserved=gpu.memory_reserved(place),
        peak_allocated=gpu.max_memory_allocated(place),
        peak_reserved=gpu.max_memory_reserved(place),
        used=total - free,
        total=total,
    )


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak device memory of this process, bytes. Produced by `peak_since`."""

    total: int
    """Reserved by the allocator, plus `runtime`."""
    runtime: int
    """Outside the allocator: CUDA context, kernels, NCCL buffers; 0 without a GPU."""
    allocated: int
    reserved: int
    others_known: bool
    """False if the memory of other processes is unknown and so counted as this process's."""


def peak_since(before: int | None) -> Peak:
    """Peak since `reset_peaks`. before: `used_by_driver()`; without a GPU `memory().used` before the build."""
    end, others = memory(), before or 0
    runtime = max(0, end.used - others - end.reserved) if device.HAVE_GPU else 0
    return Peak(
        total=end.peak_reserved + (runtime if device.HAVE_GPU else -others),
        runtime=runtime,
        allocated=end.peak_allocated,
        reserved=end.peak_reserved,
        others_known=before is not None,
    )


def used_by_driver() -> int | None:
    """Bytes in use by all processes on this process's GPU; None if the driver cannot be queried.

    Before this process initializes CUDA they belong to other processes.
    """
    found = nvidia_smi("memory.used")
    return int(found) * 2**20 if found is not None and found.isdecimal() else None


def reset_peaks() -> None:
    """Release cached blocks and reset the peaks."""
    gc.collect()
    if not device.HAVE_GPU:
        Path("/proc/self/clear_refs").write_text("5")
        return
    device.synchronize()
    gpu = torch.get_device_module(device.device())
    gpu.empty_cache()
    gpu.reset_peak_memory_stats(device.device())


def _resident(field: str) -> int:
    line = next(line for line in _lines("/proc/self/status") if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").splitlines()

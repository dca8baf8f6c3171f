"""What a GPU has: memory, arithmetic, links. Makers' figures, dense and per direction."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual machine."""

    name: str
    memory_bytes: int
    """Device memory that a process can be given."""
    memory_bytes_per_second: float
    bf16_flops: float
    """Dense bf16 tensor-core FLOP/s, without sparsity."""
    nvlink_bytes_per_second: float
    """NVLink, one direction."""
    nic_bytes_per_second: float
    """One network card; there is one a GPU."""
    per_node: int
    """GPUs that share NVLink and a host; the planner's splits are whole nodes of them."""
    source: str
    device_names: tuple[str, ...]
    """What CUDA calls it."""


GPUS: dict[str, Gpu] = {
    "h100-80g": Gpu(
        name="NVIDIA H100 SXM 80 GB",
        memory_bytes=81_559 * MIB,
        memory_bytes_per_second=3.35e12,
        bf16_flops=989.4e12,
        nvlink_bytes_per_second=450e9,
        nic_bytes_per_second=50e9,
        per_node=8,
        source="NVIDIA H100 data sheet; memory as nvidia-smi shows it; 400 Gb/s card a GPU as in DGX H100",
        device_names=("NVIDIA H100 80GB HBM3",),
    ),
    "h200": Gpu(
        name="NVIDIA H200 SXM 141 GB",
        memory_bytes=143_771 * MIB,
        memory_bytes_per_second=4.8e12,
        bf16_flops=989.4e12,
        nvlink_bytes_per_second=450e9,
        nic_bytes_per_second=50e9,
        per_node=8,
        source="NVIDIA H200 data sheet; memory as nvidia-smi shows it; 400 Gb/s card a GPU as in DGX H200",
        device_names=("NVIDIA H200",),
    ),
    "gb200": Gpu(
        name="NVIDIA GB200 (one GPU of NVL72)",
        memory_bytes=186_000_000_000,
        memory_bytes_per_second=8.0e12,
        bf16_flops=2.5e15,
        nvlink_bytes_per_second=900e9,
        nic_bytes_per_second=50e9,
        per_node=4,
        source="NVIDIA GB200 NVL72 data sheet over 72 GPUs; 400 Gb/s card a GPU",
        device_names=("NVIDIA GB200",),
    ),
}
"""`--gpu` -> its figures."""


def gpu_of_device(name: str) -> str | None:
    """The key of `GPUS` for a device name as CUDA gives it, or for a key itself; None for other GPUs.

    Only whole names: an "NVIDIA H100 PCIe" or "NVIDIA H200 NVL" computes and communicates at other rates.
    """
    return next((key for key, gpu in GPUS.items() if name == key or name in gpu.device_names), None)

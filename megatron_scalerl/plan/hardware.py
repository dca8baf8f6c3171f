"""Figures of GPUs from data sheets, and the kernels that a trainer runs on GPUs.

FLOP/s are dense, and bandwidths are for one direction."""

from typing import Literal

from megatron_scalerl.record import record

MIB = 2**20
GIB = 2**30
Layers = Literal["te", "plain"]
"""Layers of the trainer: Transformer Engine's ("te") or Megatron-Core's own ("plain")."""
Device = Literal["cpu", "gpu"]


@record
class Gpu:
    """A GPU model in its usual server."""

    name: str
    memory_bytes: int
    """Device memory that a process can allocate."""
    memory_bytes_per_second: float
    bf16_flops: float
    """Dense bf16 tensor-core FLOP/s, without sparsity."""
    nvlink_bytes_per_second: float
    """NVLink bandwidth in one direction."""
    nic_bytes_per_second: float
    """Bandwidth of a network card; there is one card per GPU."""
    per_node: int
    """Number of GPUs per node. The planner assigns whole nodes."""
    source: str
    device_names: tuple[str, ...]
    """Names of the model in CUDA."""
    capability: tuple[int, int]
    """CUDA's compute capability."""


GPUS: dict[str, Gpu] = {
    "h100-80g": Gpu(
        name="NVIDIA H100 SXM 80 GB",
        memory_bytes=81_559 * MIB,
        memory_bytes_per_second=3.35e12,
        bf16_flops=989.4e12,
        nvlink_bytes_per_second=450e9,
        nic_bytes_per_second=50e9,
        per_node=8,
        source="NVIDIA H100 data sheet; memory as nvidia-smi shows it; 400 Gb/s network card per GPU as in DGX H100",
        device_names=("NVIDIA H100 80GB HBM3",),
        capability=(9, 0),
    ),
    "h200": Gpu(
        name="NVIDIA H200 SXM 141 GB",
        memory_bytes=143_771 * MIB,
        memory_bytes_per_second=4.8e12,
        bf16_flops=989.4e12,
        nvlink_bytes_per_second=450e9,
        nic_bytes_per_second=50e9,
        per_node=8,
        source="NVIDIA H200 data sheet; memory as nvidia-smi shows it; 400 Gb/s network card per GPU as in DGX H200",
        device_names=("NVIDIA H200",),
        capability=(9, 0),
    ),
    "b300": Gpu(
        name="NVIDIA B300 SXM 288 GB",
        memory_bytes=288_000_000_000,
        memory_bytes_per_second=8.0e12,
        bf16_flops=2.25e15,
        nvlink_bytes_per_second=900e9,
        nic_bytes_per_second=100e9,
        per_node=8,
        source="NVIDIA HGX B300 data sheet over 8 GPUs; 800 Gb/s network card per GPU",
        device_names=("NVIDIA B300 SXM6 AC",),
        capability=(10, 3),
    ),
    "gb200": Gpu(
        name="NVIDIA GB200 (one GPU of NVL72)",
        memory_bytes=186_000_000_000,
        memory_bytes_per_second=8.0e12,
        bf16_flops=2.5e15,
        nvlink_bytes_per_second=900e9,
        nic_bytes_per_second=50e9,
        per_node=4,
        source="NVIDIA GB200 NVL72 data sheet over 72 GPUs; 400 Gb/s network card per GPU",
        device_names=("NVIDIA GB200",),
        capability=(10, 0),
    ),
    "rtx4090-24g": Gpu(
        name="NVIDIA GeForce RTX 4090 24 GB",
        memory_bytes=24_564 * MIB,
        memory_bytes_per_second=1.008e12,
        bf16_flops=165.2e12,
        nvlink_bytes_per_second=32e9,
        nic_bytes_per_second=12.5e9,
        per_node=8,
        source="NVIDIA Ada whitepaper; memory as nvidia-smi shows it; PCIe 4.0 x16; a 100 Gb/s card is assumed",
        device_names=("NVIDIA GeForce RTX 4090",),
        capability=(8, 9),
    ),
}
"""GPU models by the name that `--gpu` takes."""


def gpu_of_device(name: str) -> str | None:
    """The key of `GPUS` for `name`, which is a CUDA device name or a key of `GPUS`; None for an unknown GPU.

    Names have to match exactly, because "NVIDIA H100 PCIe" and "NVIDIA H200 NVL" differ from the SXM models in FLOP/s
    and bandwidths.
    """
    return next((key for key, gpu in GPUS.items() if name == key or name in gpu.device_names), None)


@record
class Kernels:
    """Layers and device of a trainer. Raises ValueError for Transformer Engine's layers (`te`) on a CPU."""

    layers: Layers
    device: Device

    def __post_init__(self) -> None:
        if self.layers == "te" and self.device == "cpu":
            raise ValueError("layers: Transformer Engine does not run on a CPU; set plain instead of te")


PLAIN_ON_GPU = Kernels(layers="plain", device="gpu")

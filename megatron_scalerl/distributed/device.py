"""Device abstraction: the one module of the package that uses `torch.cuda`.

All other modules take devices from a tensor or from `device()`, the backend of collectives from `backend()`, and
choose layers by `HAVE_TE`. Without a visible GPU `prepare` patches Megatron-Core (`cpu_compat`).
"""

import importlib.util
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist

from megatron_scalerl.distributed import cpu_compat

logger = logging.getLogger(__name__)

HAVE_GPU: bool = torch.cuda.is_available()
"""True if PyTorch sees a GPU. Set CUDA_VISIBLE_DEVICES to the empty string to use the CPUs of a machine with GPUs."""

LAYERS: str = os.environ.get("MSRL_LAYERS", "")
"""Environment variable MSRL_LAYERS: "plain" disables Transformer Engine's layers, "te" requires the layers, "" uses
the layers if Transformer Engine is installed and a GPU is visible."""

_CAN_TE = HAVE_GPU and importlib.util.find_spec("transformer_engine") is not None
HAVE_TE: bool = _CAN_TE and LAYERS != "plain"
"""True if Transformer Engine's layers are used: the package is installed, a GPU is visible, and MSRL_LAYERS is not
"plain"."""


def device() -> torch.device:
    """Device of this process: the GPU of LOCAL_RANK, or the CPU."""
    if not HAVE_GPU:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def gpu_count() -> int:
    """Number of GPUs that this process sees."""
    return torch.cuda.device_count()


def gpu_memory() -> int:
    """Size of the memory of `device()` (bytes); 0 without a GPU."""
    if not HAVE_GPU:
        return 0
    return int(torch.cuda.get_device_properties(device()).total_memory)


def capability() -> tuple[int, int]:
    """CUDA's compute capability of `device()`; (0, 0) without a GPU."""
    if not HAVE_GPU:
        return 0, 0
    return torch.cuda.get_device_capability(device())


def backend() -> str:
    """Backend of collectives on `device()`: "nccl" or "gloo"."""
    if HAVE_GPU:
        return "nccl"
    return "gloo"


def prepare(
    *, threads: int, deterministic: bool, variables: Mapping[str, str] = MappingProxyType({})
) -> torch.device:
    """Prepare this process for training and return the device. Must be called once, before the model is built.

    On a CPU: installs the patches of `cpu_compat` and sets torch's number of threads. On a GPU: sets those
    `variables` that the environment lacks, selects the GPU, and turns TF32 off, so that fp32 products are exact.
    Raises ValueError if the layers that MSRL_LAYERS requires are not available, or if an environment variable
    contradicts `deterministic`.
    """
    if LAYERS == "te" and not _CAN_TE:
        raise ValueError("MSRL_LAYERS: 'te' needs Transformer Engine and a visible GPU; set plain")
    if LAYERS not in ("", "plain", "te"):
        raise ValueError(f"MSRL_LAYERS: {LAYERS!r} is not known; set plain or te")
    if HAVE_GPU:
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device())
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if not HAVE_TE:
            cpu_compat.install_without_te()
        if deterministic:
            _set_deterministic()
    else:
        torch.set_num_threads(threads)
        cpu_compat.install()
    return device()


DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}
"""Environment variable -> values with which a run on GPUs is deterministic; the first is set by default. The values
for NCCL are from Megatron-LM's --deterministic-mode."""


def _set_deterministic() -> None:
    for name, values in DETERMINISTIC.items():
        value = os.environ.setdefault(name, values[0])
        if value not in values:
            raise ValueError(f"environment: {name} is {value}; trainer.deterministic needs {' or '.join(values)}")
    torch.use_deterministic_algorithms(True, warn_only=True)


def connect_peers() -> None:
    """Run a collective of all ranks, if on GPUs. Ranks that cannot reach each other then fail at the start, not in a
    step.

    Without this call NCCL would create the world's communicator only at the end of the first step. The argument
    `device_id` of `init_process_group` would also create the communicator at once, but PyTorch would then split the
    communicator for every subgroup, and require that ranks outside of the subgroup take part, also for gloo groups
    (torch/distributed/distributed_c10d.py:2040-2057 of 2.13). Megatron creates gloo groups without ranks outside.
    """
    if HAVE_GPU:
        dist.all_reduce(torch.zeros(1, device=device()))
        torch.cuda.synchronize()


def seed_everything(seed: int) -> None:
    """Seed the random number generators of Python, numpy, torch and Megatron. Needs Megatron's process groups."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Label the block with this name in torch's profiler and, on a GPU, with NVTX for Nsight Systems."""
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if HAVE_GPU else nullcontext():
        yield


@contextmanager
def recorded_memory(path: Path) -> Iterator[None]:
    """Record the GPU memory allocations of the block and write the record to `path`, even after an exception.

    pytorch.org/memory_viz shows the file. A file that cannot be written is logged. Does nothing without a GPU.
    """
    if not HAVE_GPU:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as error:
            logger.warning("the memory snapshot cannot be written: %s", error)
        torch.cuda.memory._record_memory_history(enabled=None)


def synchronize() -> None:
    """Wait for the work that is queued on the GPU, so that measured wall times include the work."""
    if HAVE_GPU:
        torch.cuda.synchronize()

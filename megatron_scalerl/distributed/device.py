"""Device abstraction: the one module of the package that uses `torch.cuda`.

All other modules take devices from a tensor or from `device()`, the backend of collectives from `backend()`, and
layers from `HAVE_TE`. Without a visible GPU `prepare` installs `cpu_compat`, which patches Megatron-Core and is never
installed by an import.
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
"""True where PyTorch sees a GPU. Hide GPUs (CUDA_VISIBLE_DEVICES=) to run the CPU path on a GPU machine."""

LAYERS: str = os.environ.get("MSRL_LAYERS", "")
"""MSRL_LAYERS: "plain" disables Transformer Engine's layers, "te" requires the layers, "" enables the layers where
Transformer Engine runs."""

_CAN_TE = HAVE_GPU and importlib.util.find_spec("transformer_engine") is not None
HAVE_TE: bool = _CAN_TE and LAYERS != "plain"
"""True if Transformer Engine's layers are used: the package is installed, a GPU is visible, and MSRL_LAYERS
permits."""


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
    """Prepare this process for training and return the device; call once, before the model is built.

    A CPU gets the compatibility patches and `threads`. A GPU gets the `variables` that are not in the environment, is
    selected, and runs without TF32, so that fp32 products are exact. Raises ValueError for layers in MSRL_LAYERS that
    are not available here, and for environment variables that contradict a deterministic run.
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
"""Environment variable -> values that keep a run on GPUs deterministic; our default comes first. NCCL's values are
those of Megatron-LM's --deterministic-mode."""


def _set_deterministic() -> None:
    for name, values in DETERMINISTIC.items():
        value = os.environ.setdefault(name, values[0])
        if value not in values:
            raise ValueError(f"environment: {name} is {value}; trainer.deterministic needs {' or '.join(values)}")
    torch.use_deterministic_algorithms(True, warn_only=True)


def connect_peers() -> None:
    """Run the first collective of the world on GPUs, so that ranks that cannot reach each other fail here, not in a
    step.

    Without this call NCCL creates the world's communicator when the first step ends. `init_process_group(device_id=)`
    would also create the communicator at once, but is not used. PyTorch would then split the communicator for every
    subgroup and require ranks outside the subgroup to take part, whatever the subgroup's backend is. Megatron has
    several gloo groups in which ranks outside do not take part (torch/distributed/distributed_c10d.py:2040-2057 of
    2.13).
    """
    if HAVE_GPU:
        dist.all_reduce(torch.zeros(1, device=device()))
        torch.cuda.synchronize()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's tensor- and expert-parallel RNGs. Call after `parallel.join_world`."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """A block that torch's profiler shows under this name. On a GPU NVTX marks the block too, for Nsight Systems."""
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if HAVE_GPU else nullcontext():
        yield


@contextmanager
def recorded_memory(path: Path) -> Iterator[None]:
    """A block whose allocations on a GPU are written to `path`, for pytorch.org/memory_viz, even after an exception.

    If the file cannot be written, the log says so.
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
    """Wait for the work that is queued on `device()`, so that wall times include the work."""
    if HAVE_GPU:
        torch.cuda.synchronize()

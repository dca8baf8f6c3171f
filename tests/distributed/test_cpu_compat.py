"""The CPU patches are opt-in, refuse GPUs, and name the Megatron-Core that they were written for."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from megatron_scalerl.distributed import cpu_compat


def test_installed_megatron_core_is_the_version_of_the_patches() -> None:
    """Another Megatron-Core fails here by name: read every patch's upstream lines before moving the pin."""
    assert version("megatron-core") in cpu_compat.MEGATRON_CORE_VERSIONS
    cpu_compat.check_version()


def test_another_version_is_refused_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "MEGATRON_CORE_VERSIONS", ("0.99.0",))
    with pytest.raises(ValueError, match=r"expected version 0\.99\.0.*found 0\.1"):
        cpu_compat.install()


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="expected no visible GPU, found one"):
        cpu_compat.install()


def test_importing_the_seam_patches_nothing() -> None:
    """In a process of its own: current_device still raises after the import."""
    code = (
        "import torch, megatron_scalerl.distributed.device, megatron_scalerl.distributed.cpu_compat\n"
        "try:\n    torch.cuda.current_device()\nexcept (AssertionError, RuntimeError):\n    print('untouched')\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "untouched"

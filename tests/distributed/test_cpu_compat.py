"""The CPU patches are opt-in, refuse GPUs, and name the Megatron-Core that they were written for."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_scalerl.distributed import cpu_compat

CORE = Path(megatron.core.__file__).parent


def test_installed_megatron_core_is_the_version_of_the_patches() -> None:
    """Another Megatron-Core fails here by name: read every patch's upstream lines before moving the pin."""
    assert version("megatron-core") == cpu_compat.MEGATRON_CORE_VERSION == "0.16.1"
    cpu_compat.check_version()


def test_another_version_is_refused_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "MEGATRON_CORE_VERSION", "0.99.0")
    with pytest.raises(ValueError, match=r"expected version 0\.99\.0.*found 0\.16\.1"):
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


def test_every_patch_names_upstream_lines_that_exist() -> None:
    for name, patch in cpu_compat.PATCHES.items():
        cited = re.findall(r"([\w/]+\.py):([\d,\s-]+)", patch.__doc__ or "")
        assert cited or "LITERAL_FILES" in (patch.__doc__ or ""), name
        for path, numbers in cited:
            files = [f for f in CORE.rglob(Path(path).name) if f.as_posix().endswith(f"/{path}")]
            longest = max((f.read_text().count("\n") for f in files), default=0)
            assert max(map(int, re.findall(r"\d+", numbers))) <= longest, (name, path)


def test_every_literal_file_has_a_device_literal() -> None:
    for name in cpu_compat.LITERAL_FILES:
        text = (CORE / f"{name.replace('.', '/')}.py").read_text()
        assert re.search(r"""device=["']cuda["']""", text), name

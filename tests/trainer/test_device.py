"""The device seam on a machine without a GPU, and that nothing outside it says cuda."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import megatron_scalerl
from megatron_scalerl.trainer import device

SEAM = {"trainer/device.py", "trainer/cpu_compat.py", "logits/cuda_backend.py"}
GUARDED = ("trainer", "logits", "models", "losses")


def test_without_a_gpu_the_seam_is_cpu_and_gloo() -> None:
    if device.HAVE_GPU:
        assert (device.device().type, device.backend()) == ("cuda", "nccl")
        return
    assert (device.device(), device.backend()) == (torch.device("cpu"), "gloo")
    assert not device.HAVE_TE and not device.HAVE_APEX


def test_only_the_seam_says_cuda() -> None:
    """Strings and attributes; CUDA_VISIBLE_DEVICES and prose in capitals are no device."""
    root = Path(megatron_scalerl.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for part in GUARDED
        for path in sorted((root / part).rglob("*.py"))
        if str(path.relative_to(root)) not in SEAM
        for line in path.read_text().splitlines()
        if re.search(r"torch\.cuda|\.cuda\(|[\"']cuda|is_cuda", line)
    ]
    assert not found, found


def test_only_parallel_reads_parallel_state() -> None:
    root = Path(megatron_scalerl.__file__).parent
    found = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if re.search(r"import parallel_state|parallel_state\.", path.read_text())
    ]
    assert found == ["trainer/parallel.py"]

"""The device seam on a machine without a GPU, and that nothing outside it says cuda."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


LAYERS = """
import importlib, os, torch
torch.cuda.is_available = lambda: True
from megatron_scalerl.trainer import device
for asked in ("", "plain", "te"):
    os.environ["MSRL_LAYERS"] = asked
    print(asked, importlib.reload(device).HAVE_TE)
"""


def test_transformer_engine_can_be_left_out(tmp_path: Path) -> None:
    """The package is an empty stand-in: only whether it is taken is asked."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), str(Path(megatron_scalerl.__file__).parent.parent)])
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", LAYERS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == [" True", "plain False", "te True"]


@pytest.mark.parametrize("asked", ["te", "TE"])
def test_layers_that_cannot_be_had_are_refused_in_one_line(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LAYERS", asked)
    monkeypatch.setattr(device, "_CAN_TE", False)
    with pytest.raises(ValueError, match=f"^MSRL_LAYERS: expected plain, or te where .* found '{asked}'$"):
        device.prepare(threads=1, deterministic=False)

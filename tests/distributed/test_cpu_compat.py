"""The CPU patches are opt-in and refuse GPUs."""

import sys

import pytest
from programs import printed

from megatron_scalerl.distributed import cpu_compat


def test_a_visible_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ValueError, match="cpu_compat: a GPU is visible"):
        cpu_compat.install()


def test_importing_the_seam_patches_nothing():
    """In a process of its own: current_device still raises after the import."""
    code = (
        "import torch, megatron_scalerl.distributed.device, megatron_scalerl.distributed.cpu_compat\n"
        "try:\n    torch.cuda.current_device()\nexcept (AssertionError, RuntimeError):\n    print('untouched')\n"
    )
    assert printed(sys.executable, "-c", code).strip() == "untouched"

"""The GPU backends on a GPU. The comparisons are those of `check-gpu`; left out where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_scalerl.check_gpu import logit_parity
from megatron_scalerl.logits.choice import chosen_backend

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("backend", ["cuda", "triton"])


@pytest.fixture
def gpu() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


@BOTH
def test_every_promise_of_the_projection(gpu: torch.device, backend: str) -> None:
    shares = logit_parity.shares_of_bounds(gpu, backend)
    assert len(shares) == 12 and {case: share for case, share in shares.items() if not share <= 1.0} == {}


@BOTH
def test_fp32_operands_meet_no_tf32(gpu: torch.device, backend: str) -> None:
    assert logit_parity.tf32_share(gpu, backend) <= 1.0


@BOTH
def test_the_workspace_bounds_the_allocator(gpu: torch.device, backend: str) -> None:
    assert logit_parity.memory_over_bound(gpu, backend) <= 1.0


def test_auto_takes_the_row_kernels(gpu: torch.device) -> None:
    assert chosen_backend(gpu, torch.bfloat16) == "cuda" and chosen_backend(gpu, torch.float64) == "torch"

"""The weight transport on each device: digests, packing, sending. NCCL does not support two ranks on one GPU, so that
nothing is received over it here; the run with two GPUs in test_gpu_loop.py does that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_scalerl.weights.digest import digest, value_digest


@pytest.fixture
def place(device: str) -> Any:
    return torch.device("cpu") if device == "cpu" else torch.accelerator.current_accelerator()


@pytest.mark.parametrize("size", [8, 8 << 20, (20 << 20) + 64])
def test_the_digest_of_bytes_is_the_cpus(size: int, place: Any) -> None:
    """Less than a chunk, one chunk, several chunks (8 MiB each) with a remainder."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert digest(data.to(place)) == digest(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_digest_of_values_is_the_cpus(dtype: torch.dtype, place: Any) -> None:
    values = torch.randn(300, 7, 500, generator=torch.Generator().manual_seed(1))
    part, along = values.to(dtype).transpose(0, 2), (range(500), range(7), range(300))
    assert value_digest(part.to(place), 1, (2, 1, 0), along) == value_digest(part, 1, (2, 1, 0), along)


@pytest.mark.slow
def test_the_same_weights_are_sent_thrice(ranks: Callable, device: str, record_property: Any) -> None:
    """Rank 0 of a group of one: header, packing, digest, broadcast."""
    size = dict(matrices=2, width=256) if device == "cpu" else dict(matrices=64, width=4096)
    [(digests, rate)] = ranks(1, "gpu_ranks:send", *size.values(), device=device)
    record_property("GiB/s", rate)
    assert len(digests) == 1

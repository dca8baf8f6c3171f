"""The logit projection cut over a tensor-parallel group: equal to one process, bitwise equal on all ranks."""

from __future__ import annotations

import logits_ranks
import pytest
import torch
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [(0.0, 10), (-500.0, 12), (500.0, 12), (0.0, 24)]
"""(level of all logits, padded vocabulary): 24 rows over two ranks leave the second rank nothing but padding."""


@pytest.fixture(scope="module")
def by_two() -> list[list[dict[str, torch.Tensor]]]:
    return run_ranks(2, "logits_ranks:both_dtypes", CASES)


def case(index: int, dtype: torch.dtype) -> tuple[int, dict[str, torch.Tensor]]:
    place = 2 * index + (dtype is torch.float32)
    return place, logits_ranks.run(*CASES[index], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_two_ranks_give_the_result_of_one(index: int, dtype: torch.dtype, by_two: list) -> None:
    place, alone = case(index, dtype)
    tolerance = 1e-12 if dtype is torch.float64 else max(2e-6, abs(CASES[index][0]) * 2**-22)
    found = by_two[0][place]
    for name in ("logprob", "entropy"):
        assert (found[name] - alone[name]).abs().max() < tolerance, name
    assert (found["grad_h"] - alone["grad_h"]).norm() < 20 * tolerance * alone["grad_h"].norm().clamp(min=1)
    grad_w = torch.cat([by_two[rank][place]["grad_w"] for rank in range(2)])
    assert (grad_w - alone["grad_w"]).abs().max() < 20 * tolerance
    assert grad_w[logits_ranks.VOCAB :].abs().sum() == 0


@pytest.mark.parametrize("place", range(2 * len(CASES)))
def test_ranks_agree_bit_for_bit(place: int, by_two: list) -> None:
    for name in ("logprob", "entropy", "grad_h"):
        assert torch.equal(by_two[0][place][name], by_two[1][place][name]), name

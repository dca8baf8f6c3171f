"""One rank of each data-parallel rank receives its batch, and its peers get it from it over Megatron's groups.

All ranks then take the step that they took on a batch packed locally, to the bit. Not exercised: NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2 = {"context_parallel_size": 2}
Layouts = dict[str, tuple[str, dict[str, int], set[int]]]
"""Policy, layout, and the ranks that receive a batch."""
TWO_RANKS: Layouts = {
    "tp2": ("llama", TP2, {0}),
    "pp2": ("llama", PP2, {0}),
    "cp2": ("llama4", CP2, {0}),
    "ep2": ("llama4", EP2, {0, 1}),
}
FOUR_RANKS: Layouts = {
    "tp2 pp2": ("llama", {**TP2, **PP2}, {0}),
    "tp2 cp2": ("llama", {**TP2, **CP2}, {0}),
    "pp2 cp2": ("llama", {**PP2, **CP2}, {0}),
    "pp2 dp2": ("llama", PP2, {0, 1}),
    "tp2 dp2": ("llama", TP2, {0, 2}),
    "cp2 ep2": ("llama4", {**CP2, **EP2}, {0, 2}),
}


def ran(world_size: int, layouts: Layouts, policies: dict[str, str]) -> list[dict[str, Any]]:
    jobs = [(name, policies[kind], layout) for name, (kind, layout, _) in layouts.items()]
    return run_ranks(world_size, "batch_ranks:many", jobs)


@pytest.fixture(scope="module")
def by_two(policies: dict[str, str]) -> list[dict[str, Any]]:
    return ran(2, TWO_RANKS, policies)


@pytest.fixture(scope="module")
def by_four(policies: dict[str, str]) -> list[dict[str, Any]]:
    return ran(4, FOUR_RANKS, policies)


def same_steps(found: list[dict[str, Any]], kind: str, holding: set[int]) -> None:
    """Only these ranks held a batch, and all took the step of a batch packed locally."""
    assert {rank for rank, each in enumerate(found) if each["holds"]} == holding
    assert sorted(each["dp_rank"] for each in found if each["holds"]) == sorted({each["dp_rank"] for each in found})
    assert {each["experts"] for each in found} == {(4, 1) if kind == "llama4" else None}
    for each in found:
        assert each["equal"] and each["weights"]
        for (ours, theirs), (first, _) in zip(each["reports"], found[0]["reports"], strict=True):
            assert {**ours[3], "seconds": 0} == {**theirs[3], "seconds": 0}
            assert ours[:3] == theirs[:3] == first[:3]


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_take_the_step_of_a_local_batch(by_two: list[dict[str, Any]], name: str) -> None:
    kind, _, holding = TWO_RANKS[name]
    same_steps([rank[name] for rank in by_two], kind, holding)


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_take_the_step_of_a_local_batch(by_four: list[dict[str, Any]], name: str) -> None:
    kind, _, holding = FOUR_RANKS[name]
    same_steps([rank[name] for rank in by_four], kind, holding)

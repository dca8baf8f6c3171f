"""One rank of each data-parallel rank receives its batch, and its peers get it from it over Megatron's groups.

All ranks then take the step that they took on a batch packed locally, to the bit. Not exercised: NCCL.
"""

from functools import cache

import pytest
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2 = {"context_parallel_size": 2}
Layouts = dict[str, tuple[str, dict[str, int], set[int]]]
"""Policy, layout, and the ranks that receive a batch."""
TWO_RANKS = {
    "tp2": ("llama", TP2, {0}),
    "pp2": ("llama", PP2, {0}),
    "cp2": ("llama4", CP2, {0}),
    "ep2": ("llama4", EP2, {0, 1}),
}
FOUR_RANKS = {
    "tp2 pp2": ("llama", {**TP2, **PP2}, {0}),
    "tp2 cp2": ("llama", {**TP2, **CP2}, {0}),
    "pp2 cp2": ("llama", {**PP2, **CP2}, {0}),
    "pp2 dp2": ("llama", PP2, {0, 1}),
    "tp2 dp2": ("llama", TP2, {0, 2}),
    "cp2 ep2": ("llama4", {**CP2, **EP2}, {0, 2}),
}


LAYOUTS = {2: TWO_RANKS, 4: FOUR_RANKS}


@pytest.fixture(scope="module")
def ran(policies):
    """World size -> what each rank found, by layout."""

    @cache
    def by_ranks(world_size):
        jobs = [(name, policies[kind], layout) for name, (kind, layout, _) in LAYOUTS[world_size].items()]
        return run_ranks(world_size, "batch_ranks:many", jobs)

    return by_ranks


@pytest.mark.parametrize(
    ("world_size", "name"),
    [*((2, name) for name in TWO_RANKS), *(pytest.param(4, name, marks=pytest.mark.full) for name in FOUR_RANKS)],
)
def test_ranks_take_the_step_of_a_local_batch(ran, world_size, name):
    """Only these ranks held a batch, and all took the step of a batch packed locally."""
    kind, _, holding = LAYOUTS[world_size][name]
    found = [rank[name] for rank in ran(world_size)]
    assert {rank for rank, each in enumerate(found) if each["holds"]} == holding
    assert sorted(each["dp_rank"] for each in found if each["holds"]) == sorted({each["dp_rank"] for each in found})
    assert {each["experts"] for each in found} == {(4, 1) if kind == "llama4" else None}
    for each in found:
        assert each["equal"] and each["weights"]
        for (ours, theirs), (first, _) in zip(each["reports"], found[0]["reports"], strict=True):
            assert {**ours[3], "seconds": 0} == {**theirs[3], "seconds": 0}
            assert ours[:3] == theirs[:3] == first[:3]

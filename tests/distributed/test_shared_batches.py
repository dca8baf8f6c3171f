"""One rank of each data-parallel rank receives its batch, and its peers get it from it over Megatron's groups.

All ranks then take the step that they took on a batch packed locally, to the bit. Not exercised: NCCL.
"""

import pytest
from chosen import Worlds
from layouts import kind_of, layout_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOLDING = {
    2: {"llama tp2": {0}, "llama pp2": {0}, "llama4 cp2": {0}, "llama4 ep2": {0, 1}},
    4: {
        "llama tp2 pp2": {0},
        "llama tp2 cp2": {0},
        "llama pp2 cp2": {0},
        "llama pp2 dp2": {0, 1},
        "llama tp2 dp2": {0, 2},
        "llama4 cp2 ep2": {0, 2},
    },
}
"""World size -> row -> the ranks that receive a batch."""


@pytest.fixture(scope="module")
def ran(policies):
    return Worlds(
        "batch_ranks:many", lambda size: [(row, policies[kind_of(row)], layout_of(row)) for row in HOLDING[size]]
    )


@pytest.mark.parametrize(
    "world_size, row",
    [
        pytest.param(size, row, marks=pytest.mark.full if size == 4 else ())
        for size, rows in HOLDING.items()
        for row in rows
    ],
)
def test_ranks_take_the_step_of_a_local_batch(ran, world_size, row):
    """Only these ranks held a batch, and all took the step of a batch packed locally."""
    found = [rank[row] for rank in ran[world_size]]
    assert {rank for rank, each in enumerate(found) if each["holds"]} == HOLDING[world_size][row]
    assert sorted(each["dp_rank"] for each in found if each["holds"]) == sorted({each["dp_rank"] for each in found})
    assert {each["experts"] for each in found} == {(4, 1) if kind_of(row) == "llama4" else None}
    for each in found:
        assert each["equal"] and each["weights"]
        for (ours, theirs), (first, _) in zip(each["reports"], found[0]["reports"], strict=True):
            assert {**ours[3], "seconds": 0} == {**theirs[3], "seconds": 0}
            assert ours[:3] == theirs[:3] == first[:3]

"""One rank of each data-parallel rank receives its batch, and its peers get it from it over Megatron's groups.

All ranks then take the step that they took on a batch packed locally, to the bit. Not exercised: NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest
import random_policies
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2, PP2, EP2 = ({f"{kind}_model_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
CP2 = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, dict[str, int], set[int]]] = {
    "tp2 cp2": ("llama", {**TP2, **CP2}, {0}),
    "pp2 dp2": ("llama", PP2, {0, 1}),
    "cp2 ep2": ("llama4", {**CP2, **EP2}, {0, 2}),
}
"""Policy, layout of four ranks, and the ranks that receive a batch."""


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("policies")
    for kind in ("llama", "llama4"):
        random_policies.make(kind, root / kind)
    return run_ranks(
        4, "batch_ranks:many", [(name, str(root / kind), layout) for name, (kind, layout, _) in LAYOUTS.items()]
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_takes_the_step_of_a_local_batch(by_four: list[dict[str, Any]], name: str) -> None:
    found = [rank[name] for rank in by_four]
    assert {rank for rank, each in enumerate(found) if each["holds"]} == LAYOUTS[name][2]
    assert sorted(each["dp_rank"] for each in found if each["holds"]) == sorted({each["dp_rank"] for each in found})
    assert {each["experts"] for each in found} == {(4, 1) if LAYOUTS[name][0] == "llama4" else None}
    for each in found:
        assert each["equal"] and each["weights"]
        for ours, theirs in each["reports"]:
            assert {**ours[3], "seconds": 0} == {**theirs[3], "seconds": 0}
            assert ours[:3] == theirs[:3] == found[0]["reports"][each["reports"].index([ours, theirs])][0][:3]

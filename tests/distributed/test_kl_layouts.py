"""The exact divergence of algorithm.kl on every layout: as on one rank, from a frozen policy and from the base."""

import pytest
from layouts import kind_of, layout_of
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = {
    1: ("llama", "llama_tied", "olmo2_tied", "llama recomputed"),
    2: ("llama dp2", "llama tp2", "llama tp2 sp", "llama cp2", "llama_tied tp2 sp", "llama tp2 sp recomputed"),
    4: (
        "olmo2_tied tp4",
        "llama tp2 cp2 recomputed",
        "llama tp2 cp2",
        "llama tp2 sp cp2",
        "llama tp2 sp dp2",
        "llama_tied tp2 cp2",
    ),
}
SECOND = {"llama": "llama_tied", "llama_tied": "llama", "olmo2_tied": "olmo2_tied"}
"""Policy -> its frozen one; olmo2_tied, whose heads four ranks divide, has the policy as it began."""
KINDS = ("frozen", "forward", "base")


def sections(kind, row, policies, world_size):
    kl = {"coefficient": 0.5}
    more = {}
    if kind == "base":
        more = {"policy": {"lora": {"rank": 4}}}
    else:
        kl["to"] = policies[SECOND[kind_of(row)]]
        kl["direction"] = "forward" if kind == "forward" else "reverse"
    # a chunk has few tokens
    trainer = {"world_size": world_size, "micro_batch_tokens": 128, "logit_workspace_mb": 0.05}
    return {"algorithm": {"kl": kl}, "trainer": trainer, **more}


@pytest.fixture(scope="module")
def steps(policies):
    found = {}
    for size, rows in LAYOUTS.items():
        jobs = [
            (f"{row} {kind}", policies[kind_of(row)], layout_of(row), sections(kind, row, policies, size))
            for row in rows
            for kind in KINDS
        ]
        found |= run_ranks(size, "kl_ranks:steps", jobs)[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", [row for rows in LAYOUTS.values() for row in rows if " " in row])
def test_a_layout_has_the_steps_of_one_rank(row, kind, steps):
    for step, (found, expected) in enumerate(
        zip(steps[f"{row} {kind}"], steps[f"{kind_of(row)} {kind}"], strict=True)
    ):
        # AdamW's steps are signs where a gradient is as small as rounding
        rel = 1e-4 if step else 1e-5
        assert found[0] == pytest.approx(expected[0], rel=rel, abs=1e-7)
        assert found[1] == pytest.approx(expected[1], rel=2 * rel)
        assert found[2]["loss/kl"] == pytest.approx(expected[2]["loss/kl"], rel=rel, abs=1e-9)
    first, *_, last = steps[f"{row} {kind}"]
    assert last[2]["loss/kl"] > 0 and (first[2]["loss/kl"] == 0) == (kind == "base" or "olmo2" in row)

"""The trainer's step and reports do not depend on how a batch is distributed; a resumed run continues bit for bit.

Why this matters: the loss is a sum with weights of the whole batch, and Megatron would divide it by micro-batches
and ranks. Unequal loads, fillers and an idle rank show a wrong factor at once. Also, no rank may ask another for
shapes or arguments once per micro-batch. Not exercised: more than two ranks, bf16, NCCL.
"""

import re

import pytest
import torch
from chosen import Worlds, chosen
from layouts import kind_of, layout, layout_of
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GSPO = {"loss": {"name": "gspo", "clip_low": 0.9, "clip_high": 9.0}}
OUTSIDE = {"trainer": {"world_size": 2, "micro_batch_tokens": 128, "loss_in_chunk": False}}
TWO_RANKS = {
    "llama dp2": (6, {}),
    "llama dp2, three samples": (3, {}),
    "llama dp2, one rank idle": (1, {}),
    "llama dp2, gspo": (6, GSPO),
    "llama tp2": (6, {}),
    "llama pp2": (6, {}),
    "llama pp2 1+3": (6, {}),
    "llama4 ep2": (5, {}),
    "llama4 ep2, one rank idle": (1, {}),
    "llama cp2": (6, {}),
    "llama4 cp2": (6, {}),
    "llama cp2, gspo": (6, GSPO),
    "llama cp2, loss outside the projection": (6, OUTSIDE),
    "llama cp2 per-token": (6, {}),
}
"""Row, and what else -> samples, sections."""


@pytest.fixture(scope="module")
def measured(request, policies):
    """On one rank each row's policy alone, with as many samples."""

    def jobs(size):
        found = []
        for name in sorted(chosen(request, "name")):
            row, (count, more) = name.partition(",")[0], TWO_RANKS[name]
            if size == 1:
                row, more = kind_of(row), GSPO if more is GSPO else {}
            found.append((name, policies[kind_of(row)], layout_of(row), count, more))
        return found

    return Worlds("trainer_ranks:many", jobs)


@pytest.mark.parametrize("name", sampled("steps of two ranks", TWO_RANKS, 3))
def test_two_ranks_take_the_step_of_one(measured, name):
    [alone], (first, second) = ([rank[name] for rank in measured[size]] for size in (1, 2))
    assert first == second
    expected, reports = alone["reports"], first["reports"]
    for (loss, norm, tokens, metrics), found in zip(expected, reports, strict=True):
        assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert found[1] == pytest.approx(norm, rel=1e-5)
        assert found[2] == tokens
        assert found[3].keys() == metrics.keys()
        for key, value in metrics.items():
            assert found[3][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for a, b in zip(alone["logprobs"], first["logprobs"], strict=True):
        torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=0, atol=2e-4)


@pytest.mark.parametrize("words", sampled("changed elements", ["dp2", "tp2", "pp2"], 1))
def test_the_elements_that_a_step_changes_are_counted_over_all_ranks(policies, words):
    ranks = run_ranks(2, "trainer_ranks:changes", policies["llama"], layout(words))
    share = sum(changed for changed, _, _ in ranks) / sum(size for _, size, _ in ranks)
    assert 0.05 < share < 0.95
    assert [found for _, _, found in ranks] == [pytest.approx(share, rel=1e-12)] * 2


@pytest.mark.parametrize("row", sampled("resume", ["llama dp2", "llama cp2", "llama4 ep2"], 1))
def test_two_ranks_resume_bit_for_bit_from_what_was_written_beside_later_steps(policies, tmp_path, row):
    job = (policies[kind_of(row)], layout_of(row), str(tmp_path / "step_000002"))
    straight = run_ranks(2, "trainer_ranks:train_and_save", *job, True)
    resumed = run_ranks(2, "trainer_ranks:load_and_train", *job)
    for ours, theirs in zip(straight, resumed, strict=True):
        assert theirs["extra"] == {"rank": 0} and theirs["made"] == 2
        assert theirs["counters"] == {2.0} and theirs["final_counters"] == ours["final_counters"] == {4.0}
        assert theirs["reports"] == ours["reports"]
        assert [n for n, w in ours["weights"].items() if not torch.equal(w, theirs["weights"][n])] == []
        for a, b in zip(ours["optimizer"], theirs["optimizer"], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_one_data_parallel_rank_alone_holds_the_optimizers_whole_state_for_a_checkpoint(policies):
    """All of them held it, as many bytes for each rank of a node as one of them writes."""
    (first, whole), (second, stood_for) = run_ranks(2, "trainer_ranks:optimizer_bytes", policies["llama"], {})
    assert whole == stood_for and 0.95 * whole <= first and second <= 0.05 * whole


CHANGES = [
    f"{kind} {words} {state}"
    for kind in ("llama", "llama4")
    for words in ("dp2", "tp2", "pp2", "cp2")
    for state in ("sharded", "whole")
]
"""Rows of two ranks; those of one have the same state of the optimizer."""


def same_rest(found, expected):
    """Two more steps, the second of which has what the optimizer's state made of the first."""
    assert found["made"] == 2 and found["counters"] == {2.0} and found["final_counters"] == {4.0}
    for (loss, norm), report in zip(expected["reports"], found["reports"], strict=True):
        assert report == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
    name = "decoder.final_layernorm.weight"  # whole on every rank, and on the last stage
    if name in found["weights"] and name in expected["weights"]:
        torch.testing.assert_close(found["weights"][name], expected["weights"][name], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def layout_changes(request, policies, tmp_path_factory):
    """Each change that runs, in both directions: (as resumed under the other layout, as it went on without)."""
    root = tmp_path_factory.mktemp("layouts")
    jobs = {1: [], 2: []}
    rows = sorted(chosen(request, "row"))
    for row in rows:
        for ranks, words in ((2, row.partition(" ")[2]), (1, row.split()[-1])):
            jobs[ranks].append((policies[kind_of(row)], layout(words), str(root / f"{row} {ranks}")))
    straight = {ranks: run_ranks(ranks, "trainer_ranks:each", "train_and_save", jobs[ranks])[-1] for ranks in jobs}
    swapped = {
        ranks: [(*job[:2], other[2]) for job, other in zip(jobs[ranks], jobs[3 - ranks], strict=True)]
        for ranks in jobs
    }
    resumed = {ranks: run_ranks(ranks, "trainer_ranks:each", "load_and_train", swapped[ranks])[-1] for ranks in jobs}
    return {
        (row, f"to {ranks}"): (resumed[ranks][number], straight[3 - ranks][number])
        for ranks in jobs
        for number, row in enumerate(rows)
    }


@pytest.mark.parametrize("way", ["to 1", "to 2"])
@pytest.mark.parametrize("row", sampled("layout change", CHANGES, 1))
def test_a_checkpoint_goes_on_under_another_layout(layout_changes, row, way):
    same_rest(*layout_changes[row, way])


@pytest.mark.parametrize(
    "saved, loaded", sampled("another expert-parallel size", [("ep2", "dp2"), ("dp2", "ep2")], 1)
)
def test_a_checkpoint_of_another_expert_parallel_size_is_refused_in_a_line(policies, tmp_path, saved, loaded):
    path = str(tmp_path / "step_000002")
    run_ranks(2, "trainer_ranks:train_and_save", policies["llama4"], layout(saved), path)
    was, now = (2 if words == "ep2" else 1 for words in (saved, loaded))
    saved_size = f"megatron.parallel.expert_model_parallel_size {was}"
    line = f"{path}: the checkpoint was saved with {saved_size}, but this run has {now}; "
    with pytest.raises(AssertionError, match=f"\nValueError: {re.escape(line)}[^\n]*\n*$"):
        run_ranks(2, "trainer_ranks:load_and_train", policies["llama4"], layout(loaded), path)


@pytest.mark.full
def test_expert_parallel_ranks_go_on_with_half_of_the_data_parallel_ones(policies, tmp_path):
    """Four ranks, two expert-parallel groups of two; then two ranks, one group."""
    path = str(tmp_path / "step_000002")
    straight = run_ranks(4, "trainer_ranks:train_and_save", policies["llama4"], layout("ep2"), path)[0]
    resumed = run_ranks(2, "trainer_ranks:load_and_train", policies["llama4"], layout("ep2"), path)[0]
    same_rest(resumed, straight)

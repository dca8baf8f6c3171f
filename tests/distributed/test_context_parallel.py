"""Context parallelism: ranks that share a sequence take the same step as one process, over gloo.

Why this matters: a wrong order of tokens, a missing key or an unsummed gradient of keys gives plausible losses and a
policy that trains on the wrong thing. Sequence lengths are not multiples of four, and chunks (16) and temperature
steps (8) of the Llama-4 policy are shorter than the sequences, so padding, chunks and scales all matter.

Not exercised: Transformer Engine's attention, NCCL, and overlapped communication.
"""

from __future__ import annotations

from typing import Any

import pytest
import random_policies
import torch
from chosen import chosen
from parity_layouts import EP2, PLAIN, PP2, RECOMPUTED, SP, TP2, same_step, same_weights
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CP2, CP4 = ({"context_parallel_size": size} for size in (2, 4))
KINDS = ("llama", "llama4", "qwen2", "qwen3_moe")
TWO_RANKS = {
    "llama cp2": ("llama", {**PLAIN, **CP2}),
    "llama cp2 distributed optimizer": ("llama", CP2),
    "llama cp2 recomputed": ("llama", {**PLAIN, **CP2, **RECOMPUTED}),
    "llama4 cp2": ("llama4", {**PLAIN, **CP2}),
    "llama4 cp2 recomputed": ("llama4", {**PLAIN, **CP2, **RECOMPUTED}),
    "qwen2 cp2": ("qwen2", {**PLAIN, **CP2}),
    "qwen3_moe cp2": ("qwen3_moe", {**PLAIN, **CP2}),
}
BF16 = dict(dtype="bfloat16")
FOUR_RANKS = {
    "llama cp2 tp2 sp": ("llama", {**PLAIN, **CP2, **TP2, **SP}),
    "llama4 cp2 tp2 sp": ("llama4", {**PLAIN, **CP2, **TP2, **SP}),
    "llama cp2 pp2": ("llama", {**PLAIN, **CP2, **PP2}),
    "llama4 cp2 pp2": ("llama4", {**PLAIN, **CP2, **PP2}),
    "llama cp2 dp2": ("llama", {**PLAIN, **CP2}),
    "llama cp2 dp2 distributed optimizer": ("llama", CP2),
    "llama4 cp2 ep2": ("llama4", {**PLAIN, **CP2, **EP2}),
    "llama4 cp4": ("llama4", {**PLAIN, **CP4}),
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    root = tmp_path_factory.mktemp("policies")
    return {kind: (str(root / kind), random_policies.make(kind, root / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def alone(policies: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    jobs = [(kind, policies[kind][0], PLAIN) for kind in KINDS] + [("llama4 bf16", policies["llama4"][0], BF16)]
    return run_ranks(1, "parity_ranks:many", jobs)[0]


@pytest.fixture(scope="module")
def by_two(request: pytest.FixtureRequest, policies: dict[str, tuple[str, Any]]) -> list[dict[str, Any]]:
    names = chosen(request, "name") | {f"{kind} cp2" for kind in chosen(request, "kind")}
    jobs = [(name, policies[TWO_RANKS[name][0]][0], TWO_RANKS[name][1]) for name in sorted(names)]
    jobs.append(("llama4 bf16 cp2", policies["llama4"][0], {**BF16, **CP2}))
    return run_ranks(2, "parity_ranks:many", jobs)


@pytest.fixture(scope="module")
def by_four(policies: dict[str, tuple[str, Any]]) -> list[dict[str, Any]]:
    jobs = [(name, policies[kind][0], layout) for name, (kind, layout) in FOUR_RANKS.items()]
    return run_ranks(4, "parity_ranks:many", jobs)


def same_answer(found: dict[str, Any], expected: dict[str, Any], path: str) -> None:
    """The step of one rank, and the weights that it leads to.

    AdamW's first step is its learning rate times the gradient's sign: where a gradient is as small as rounding, the
    sign is anything.
    """
    same_step(found, expected)
    same_weights(found, path)
    for name, weight in expected["stepped"].items():
        moved = (weight - expected["weights"][name]).abs() > 1e-4
        apart = (found["stepped"][name] - weight).abs() > 1e-5
        assert moved.any() and apart.float().mean() < 1e-3, name


@pytest.mark.parametrize("name", sampled("context parallel steps", TWO_RANKS, 3))
def test_two_ranks_take_the_step_of_one(name: str, by_two: list, alone: dict, policies: dict) -> None:
    kind = TWO_RANKS[name][0]
    same_answer(by_two[0][name], alone[kind], policies[kind][0])


@pytest.mark.full
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_take_the_step_of_one(name: str, by_four: list, alone: dict, policies: dict) -> None:
    kind = FOUR_RANKS[name][0]
    same_answer(by_four[0][name], alone[kind], policies[kind][0])


def test_bf16_steps_agree_within_bf16(by_two: list, alone: dict) -> None:
    found, expected = by_two[0]["llama4 bf16 cp2"], alone["llama4 bf16"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
    assert float(found["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=0.2)


@pytest.mark.parametrize("kind", sampled("context parallel kinds", KINDS, 2))
def test_log_probabilities_are_hugging_faces_on_both_ranks(kind: str, by_two: list, policies: dict) -> None:
    model, expected = policies[kind][1], []
    for row in random_policies.rows():
        starts = row["cu_seqlens"].tolist()
        with torch.no_grad():
            parts = [model(input_ids=row["tokens"][:, a:b]).logits[0] for a, b in zip(starts, starts[1:])]
        log_p = torch.cat(parts).double().log_softmax(-1)
        expected.append(log_p.gather(1, row["targets"][:, None])[:, 0])
    first, second = (rank[f"{kind} cp2"]["logprobs"] for rank in by_two)
    assert torch.equal(first, second)
    assert (first[0] - torch.cat(expected)).abs().max() < 5e-5


GSPO = {"loss": {"name": "gspo", "clip_low": 0.9, "clip_high": 9.0}}
PER_TOKEN = {"megatron": {"parallel": CP2, "model": {"calculate_per_token_loss": True}}}
OUTSIDE = {"trainer": {"world_size": 2, "micro_batch_tokens": 128, "loss_in_chunk": False}}
TRAINED = {
    "llama": ("llama", {}, {}),
    "llama4": ("llama4", {}, {}),
    "llama gspo": ("llama", GSPO, GSPO),
    "llama loss outside the projection": ("llama", {}, OUTSIDE),
    "llama loss per token": ("llama", {}, PER_TOKEN),
}
"""Policy, and the recipe's sections for one rank and for two."""


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, policies: dict[str, tuple[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    cases = [(name, *TRAINED[name]) for name in sorted(chosen(request, "name"))]
    one = [(name, policies[kind][0], {}, 6, sections) for name, kind, sections, _ in cases]
    two = [(name, policies[kind][0], CP2, 6, sections) for name, kind, _, sections in cases]
    return run_ranks(1, "trainer_ranks:many", one)[0], run_ranks(2, "trainer_ranks:many", two)


@pytest.mark.parametrize("name", sampled("context parallel training", TRAINED, 2))
def test_the_trainer_reports_and_scores_as_one_rank(name: str, trained: tuple) -> None:
    """Loss, gradient norm, tokens and every metric of two steps, and the log-probabilities afterwards."""
    expected, (first, second) = trained[0][name], (rank[name] for rank in trained[1])
    assert first == second
    for (loss, norm, tokens, metrics), found in zip(expected["reports"], first["reports"], strict=True):
        assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert found[1] == pytest.approx(norm, rel=1e-5)
        assert found[2] == tokens
        assert found[3] == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in metrics.items()}
    for a, b in zip(expected["logprobs"], first["logprobs"], strict=True):
        torch.testing.assert_close(torch.tensor(b), torch.tensor(a), rtol=0, atol=2e-4)


def test_replayed_experts_follow_their_tokens(policies: dict) -> None:
    path = policies["llama4"][0]
    plain = random_policies.rows(((37, 51), (30, 58)))
    generator = torch.Generator().manual_seed(3)
    rows = [{**row, "expert_choices": torch.randint(-1, 4, (88, 4, 1), generator=generator)} for row in plain]
    jobs = [("own", path, PLAIN, plain), ("replayed", path, PLAIN, rows)]
    [one] = run_ranks(1, "routing_ranks:many", jobs)
    two = run_ranks(2, "routing_ranks:many", [("cp2", path, {**PLAIN, **CP2}, rows)])
    assert (one["own"]["logprobs"] - one["replayed"]["logprobs"]).abs().max() > 0.1
    for rank in two:
        assert (rank["cp2"]["logprobs"] - one["replayed"]["logprobs"]).abs().max() < 2e-5
    for name, grad in one["replayed"]["grads"].items():
        assert (two[0]["cp2"]["grads"][name] - grad).norm() <= 2e-5 * grad.norm(), name


def test_a_run_resumes_bit_for_bit(policies: dict, tmp_path) -> None:
    path = str(tmp_path / "step_000002")
    straight = run_ranks(2, "trainer_ranks:train_and_save", policies["llama"][0], CP2, path)
    resumed = run_ranks(2, "trainer_ranks:load_and_train", policies["llama"][0], CP2, path)
    for ours, theirs in zip(straight, resumed, strict=True):
        assert theirs["reports"] == ours["reports"]
        assert [n for n, w in ours["weights"].items() if not torch.equal(w, theirs["weights"][n])] == []
    one, two = (rank["weights"] for rank in resumed)
    assert [name for name, weight in one.items() if not torch.equal(weight, two[name])] == []

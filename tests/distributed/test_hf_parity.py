"""Log-probabilities follow from Hugging Face's logits, and the head has the precision of `policy.logits`.

Why this matters: an fp32 head on one side only is worse than on neither (docs/logits.md). Not exercised: the
engine's head (tests/e2e), fp32 accumulation on GPUs.
"""

import pytest
import random_policies
import torch
from chosen import chosen
from layouts import layout
from runner import run_ranks
from sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "qwen3_moe", "llama4")
SOME_KINDS = sampled("heads of families", KINDS, 3)


@pytest.fixture(scope="module")
def policies(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    kinds = sorted(chosen(request, "kind") | {"llama"})
    return {kind: (str(root / kind), random_policies.make(kind, root / kind)) for kind in kinds}


@pytest.fixture(scope="module")
def alone(policies):
    jobs = [(kind, policies[kind][0], {}) for kind in policies]
    jobs += [
        (f"{kind} bf16 {logits}", policies[kind][0], {**layout("bf16"), "logits": logits})
        for kind in policies
        for logits in ("fp32", "model")
    ]
    return run_ranks(1, "logit_precision_ranks:full_logits", jobs)[0]


@pytest.fixture(scope="module")
def by_two(policies):
    jobs = [("llama bf16 tp2", policies["llama"][0], layout("bf16 tp2 sp"))]
    return run_ranks(2, "logit_precision_ranks:full_logits", jobs)


def hf_logits(model):
    row = random_policies.rows()[0]
    starts = row["cu_seqlens"].tolist()
    with torch.no_grad():
        parts = [model(input_ids=row["tokens"][:, a:b]).logits[0] for a, b in zip(starts, starts[1:])]
    return torch.cat(parts)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_log_probabilities_and_entropies_follow_from_the_logits(kind, policies, alone):
    log_p = hf_logits(policies[kind][1]).double().log_softmax(-1)
    targets = random_policies.rows()[0]["targets"]
    found = alone[kind][1]
    assert found.shape == (2, len(targets)) and found.dtype == torch.float32
    assert (found[0] - log_p.gather(1, targets[:, None])[:, 0]).abs().max() < 5e-5
    assert (found[1] + (log_p.exp() * log_p).sum(-1)).abs().max() < 5e-5


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_fp32_logits_carry_bits_below_bf16_and_model_logits_do_not(kind, alone):
    def share_off_grid(logits):
        return (logits != logits.bfloat16().float()).float().mean().item()

    assert share_off_grid(alone[f"{kind} bf16 fp32"][0]) > 0.95
    assert share_off_grid(alone[f"{kind} bf16 model"][0]) == 0.0
    precise, rounded = (alone[f"{kind} bf16 {logits}"][1][0] for logits in ("fp32", "model"))
    assert precise.dtype == torch.float32 and 1e-3 < (precise - rounded).abs().max() < 0.5


def test_log_probabilities_in_bf16_are_the_same_bits_on_both_ranks(by_two, alone):
    assert torch.equal(by_two[0]["llama bf16 tp2"][1], by_two[1]["llama bf16 tp2"][1])
    assert (by_two[0]["llama bf16 tp2"][1] - alone["llama bf16 fp32"][1]).abs().max() < 1.0

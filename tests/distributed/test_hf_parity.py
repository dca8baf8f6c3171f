"""The head has the precision of `policy.logits`.

Why this matters: an fp32 head on one side only is worse than on neither (docs/logits.md). Not exercised: the
engine's head (tests/e2e), fp32 accumulation on GPUs.
"""

import pytest
import torch
from layouts import layout
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("llama", "llama_tied")


@pytest.fixture(scope="module")
def alone(policies):
    jobs = [
        (f"{kind} {logits}", policies[kind], {**layout("bf16"), "logits": logits})
        for kind in KINDS
        for logits in ("fp32", "model")
    ]
    return run_ranks(1, "logit_precision_ranks:full_logits", jobs)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_logits_carry_bits_below_bf16_and_model_logits_do_not(kind, alone):
    def share_off_grid(logits):
        return (logits != logits.bfloat16().float()).float().mean().item()

    assert share_off_grid(alone[f"{kind} fp32"][0]) > 0.95
    assert share_off_grid(alone[f"{kind} model"][0]) == 0.0
    precise, rounded = (alone[f"{kind} {logits}"][1][0] for logits in ("fp32", "model"))
    assert precise.dtype == torch.float32 and 1e-3 < (precise - rounded).abs().max() < 0.5


def test_log_probabilities_in_bf16_are_the_same_bits_on_both_ranks(policies, alone):
    jobs = [("tp2", policies["llama"], layout("bf16 tp2 sp"))]
    first, second = (rank["tp2"][1] for rank in run_ranks(2, "logit_precision_ranks:full_logits", jobs))
    assert torch.equal(first, second)
    assert (first - alone["llama fp32"][1]).abs().max() < 1.0

"""The workspace is a bound on what is really allocated, whatever the shapes; backward recomputes in it, too."""

import pytest
import torch
from logit_problems import LiveBytes, leaves, problem

from megatron_scalerl.logits import token_logprobs

TOKENS, WIDTH, VOCAB = 300, 32, 2500
ALL_LOGITS = 4 * TOKENS * VOCAB
PER_TOKEN = 160 * TOKENS
"""Bytes that grow with the tokens alone: statistics, results, targets and masks, gradients that came in."""


def peaks(dtype, workspace_mb, grad_logits, entropy):
    """Most bytes beside inputs and results in the forward pass, and beside gradients in the backward pass."""
    h, w, y = leaves(TOKENS, WIDTH, VOCAB, dtype)
    options = dict(workspace_mb=workspace_mb, grad_logits=grad_logits, entropy=entropy)
    with LiveBytes() as forward:
        pair = token_logprobs(h, w, y, **options)
    total = pair[0].sum() + (pair[1].sum() if entropy == "grad" else 0.0)
    with LiveBytes() as backward:
        total.backward()
    grads = 4 * (h.numel() + w.numel()) + (2 * w.numel() if dtype == torch.bfloat16 else 0)
    return forward.peak, backward.peak - grads


@pytest.mark.parametrize(
    "dtype, grad_logits",
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.bfloat16, "bf16x2"), (torch.bfloat16, "fp32")],
)
@pytest.mark.parametrize("workspace", [2**18, 2**20])
def test_nothing_exceeds_it(dtype, grad_logits, workspace):
    forward, backward = peaks(dtype, workspace / 2**20, grad_logits, "grad")
    assert forward < workspace + PER_TOKEN and backward < workspace + PER_TOKEN


def test_it_is_used():
    """A large workspace takes larger blocks: what is allocated grows with it, up to all logits at once."""
    small, large = (peaks(torch.float32, mb, "fp32", "none") for mb in (0.25, 16.0))
    assert small[0] < 2**18 + PER_TOKEN and small[1] < 2**18 + PER_TOKEN
    assert large[0] > ALL_LOGITS and large[1] > ALL_LOGITS


def test_nothing_of_the_logits_is_kept_for_the_backward_pass():
    h, w, y = problem(TOKENS, WIDTH, VOCAB, torch.float32)
    h.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        token_logprobs(h, w, y, entropy="grad")
    assert sorted(kept) == [TOKENS, TOKENS, TOKENS, TOKENS * WIDTH, VOCAB * WIDTH]

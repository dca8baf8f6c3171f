"""The logit projection against log_softmax, in fp64 by gradcheck, and where exponentials over- and underflow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_problems import IN_FP32_AND_BF16, by_log_softmax, gradients_by_log_softmax, leaves, problem

from megatron_scalerl.logits import token_logprobs

KIB = 1 / 1024


def test_a_number_as_temperature_is_exact_in_fp64():
    h, w, y = problem()
    found, _ = token_logprobs(h, w, y, temperature=0.7)
    expected = (h @ w.t() / 0.7).log_softmax(-1).gather(1, y[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-13


@pytest.mark.parametrize("entropy, temperature", [("none", 0.7), ("metric", 2.0), ("grad", 1.0)])
def test_gradients_in_fp64(entropy, temperature):
    h, w, y = leaves()

    def function(h, w):
        pair = token_logprobs(h, w, y, entropy=entropy, temperature=temperature, workspace_mb=1.5 * KIB, vocab_size=9)
        return pair if entropy == "grad" else pair[:1]

    y = y % 9
    assert torch.autograd.gradcheck(function, (h, w), atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    width=st.integers(1, 12),
    vocab=st.integers(1, 60),
    more_workspace=st.integers(0, 8192),
    seed=st.integers(0, 99),
)
def test_any_shape_in_any_workspace(tokens, width, vocab, more_workspace, seed):
    """From the smallest blocks up; ragged ends, one token, one column, none."""
    generator = torch.Generator().manual_seed(seed)
    h, w = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (tokens, vocab))
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    of_logprob, of_entropy = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    h.requires_grad_(), w.requires_grad_()
    smallest = 8 * (16 + 4 * 16 + 2 * 16)
    logprob, entropy = token_logprobs(h, w, y, entropy="grad", workspace_mb=(smallest + more_workspace) / 2**20)
    (logprob @ of_logprob + entropy @ of_entropy).backward()
    expected = by_log_softmax(h, w, y)
    grad_h, grad_w = gradients_by_log_softmax(h, w, y, of_logprob, of_entropy)
    for ours, theirs in ((logprob, expected[0]), (entropy, expected[1]), (h.grad, grad_h), (w.grad, grad_w)):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_entropy_carries_no_gradient_unless_asked():
    h, w, y = problem()
    h.requires_grad_()
    assert not token_logprobs(h, w, y, entropy="metric")[1].requires_grad
    assert token_logprobs(h, w, y, entropy="grad")[1].requires_grad
    assert token_logprobs(h, w, y)[1].abs().sum() == 0


def test_padded_columns_have_probability_zero():
    h, w, y = problem(vocab=11)
    padded = torch.cat([w, torch.full((5, w.shape[1]), 9.0, dtype=w.dtype)]).requires_grad_()
    logprob, entropy = token_logprobs(h, padded, y, entropy="grad", vocab_size=11)
    expected = by_log_softmax(h, w, y)
    assert torch.allclose(logprob, expected[0]) and torch.allclose(entropy, expected[1])
    (logprob.sum() + entropy.sum()).backward()
    assert padded.grad[11:].abs().max() == 0 and padded.grad[:11].abs().min() > 0


def test_tokens_without_loss_are_left_out():
    """Their hidden states may be nan and their targets nonsense: neither is read. The others are as without them."""
    h, w, y = problem(tokens=9)
    mask = torch.tensor([True, False, True, True, False, False, True, False, True])
    h[~mask], y[~mask] = math.nan, -100
    leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
    pair = token_logprobs(*leaves, y, entropy="grad", places=mask.nonzero()[:, 0])
    assert pair[0][~mask].abs().sum() == 0 and pair[1][~mask].abs().sum() == 0
    short = h[mask].clone().requires_grad_(), w.clone().requires_grad_()
    expected = token_logprobs(*short, y[mask], entropy="grad")
    assert torch.equal(pair[0][mask], expected[0]) and torch.equal(pair[1][mask], expected[1])
    for logprob, entropy in (pair, expected):
        (logprob.sum() + 0.5 * entropy.sum()).backward()
    assert leaves[0].grad[~mask].abs().sum() == 0
    assert torch.equal(leaves[0].grad[mask], short[0].grad) and torch.equal(leaves[1].grad, short[1].grad)


def test_no_token_with_loss_at_all():
    h, w, y = leaves()
    logprob = token_logprobs(h, w, y, places=torch.empty(0, dtype=torch.int64))[0]
    logprob.sum().backward()
    assert logprob.tolist() == [0.0] * 7 and h.grad.abs().sum() == 0 and w.grad.abs().sum() == 0


def test_only_what_needs_a_gradient_gets_one():
    h, w, y = problem()
    expected = gradients_by_log_softmax(h, w, y, torch.ones(7))
    for index in range(2):
        leaves = [h.clone(), w.clone()]
        leaves[index].requires_grad_()
        token_logprobs(*leaves, y)[0].sum().backward()
        assert torch.allclose(leaves[index].grad, expected[index], atol=1e-12) and leaves[1 - index].grad is None


@IN_FP32_AND_BF16
@pytest.mark.parametrize("level", [-1e4, -300.0, 0.0, 300.0, 1e4])
def test_logits_far_from_zero_stay_exact(level, dtype):
    """Adding one number to all logits changes nothing; a running maximum that starts at 0 would give nan."""
    h = torch.tensor([[1.0, level]] * 3).to(dtype)
    w = torch.tensor([[2.0, 1.0], [1.0, 1.0], [0.0, 1.0]]).to(dtype)
    w.requires_grad_()
    y = torch.tensor([0, 1, 2])
    logprob, entropy = token_logprobs(h, w, y, entropy="grad")
    expected = by_log_softmax(h[:, :1], w.detach()[:, :1], y)
    tolerance = max(1e-6, abs(level) * 2**-22)
    assert (logprob.double() - expected[0]).abs().max() < tolerance
    assert (entropy.double() - expected[1]).abs().max() < tolerance
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("workspace_mb", [1.0, 0.35 * KIB])
def test_a_certain_token_keeps_its_gradient(workspace_mb):
    """1 - p of a token with p = 1 - 2e-9: computed from p it would be 0 in fp32. In one block and in three."""
    h = torch.tensor([[20.0]], requires_grad=True)
    w = torch.tensor([[1.0], *[[-10.0]] * 8, [0.0]])
    token_logprobs(h, w, torch.tensor([0]), workspace_mb=workspace_mb)[0].sum().backward()
    assert h.grad.item() == pytest.approx(math.exp(-20.0), rel=1e-3)


def test_fp32_logits_are_exact_and_model_logits_are_rounded():
    """bf16 inputs: fp32 logits agree with fp64 to 1e-5 nats; rounded to bf16 they are off by 1e-3 and more."""
    h, w, y = problem(tokens=64, hidden=64, vocab=200, dtype=torch.bfloat16)
    truth = by_log_softmax(h, w, y)[0]
    exact = token_logprobs(h, w, y, logits="fp32")[0]
    rounded = token_logprobs(h, w, y, logits="model")[0]
    assert exact.dtype == rounded.dtype == torch.float32
    assert (exact.double() - truth).abs().max() < 2e-5
    assert (rounded.double() - truth).abs().max() > 5e-3
    z = (h @ w.t()).float()
    assert torch.equal(rounded, token_logprobs(z, torch.eye(200), y)[0])


@IN_FP32_AND_BF16
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_within_5e_5_nats_for_logits_up_to_50(dtype, temperature):
    h, w, y = problem(tokens=512, hidden=256, vocab=3000, dtype=dtype, top=50.0 * temperature)
    y[::2] = (h.double() @ w.double().t()).argmax(1)[::2]
    logprob, entropy = token_logprobs(h, w, y, entropy="metric", temperature=temperature, workspace_mb=2.0)
    expected = by_log_softmax(h, w, y, temperature)
    assert (logprob.double() - expected[0]).abs().max() < 5e-5
    assert (entropy.double() - expected[1]).abs().max() < 5e-5

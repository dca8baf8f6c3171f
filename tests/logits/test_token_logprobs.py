"""The logit projection against log_softmax, in fp64 by gradcheck, and where exponentials over- and underflow."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_scalerl.logits import token_logprobs


def problem(tokens: int = 7, hidden: int = 5, vocab: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    y = torch.randint(0, vocab, (tokens,), generator=generator)
    return h.to(dtype), w.to(dtype), y


def by_log_softmax(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (h.double() @ w.double().t()).log_softmax(-1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_two_words_by_hand() -> None:
    """Logits (ln 3, 0): probabilities 3/4 and 1/4."""
    h, w = torch.tensor([[math.log(3.0)]] * 2), torch.tensor([[1.0], [0.0]])
    logprob, entropy = token_logprobs(h, w, torch.tensor([0, 1]), entropy="metric")
    assert logprob.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], rel=1e-6)
    assert entropy.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25)] * 2, rel=1e-6)


@pytest.mark.parametrize("workspace_mb", [0.0012, 0.002, 1.0])
def test_equals_log_softmax_for_every_workspace(workspace_mb: float) -> None:
    h, w, y = problem()
    logprob, entropy = token_logprobs(h, w, y, entropy="metric", workspace_mb=workspace_mb)
    expected = by_log_softmax(h, w, y)
    assert torch.allclose(logprob, expected[0], atol=1e-13) and torch.allclose(entropy, expected[1], atol=1e-13)


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per token"])
def test_gradients_in_fp64(entropy: str, temperature: float | str) -> None:
    h, w, y = problem()
    tau = torch.linspace(0.5, 2.0, len(y), dtype=torch.float64) if temperature == "per token" else temperature
    h.requires_grad_(), w.requires_grad_()

    def function(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pair = token_logprobs(h, w, y, entropy=entropy, temperature=tau, workspace_mb=0.0015, vocab_size=9)
        return pair if entropy == "grad" else pair[:1]

    y = y % 9
    assert torch.autograd.gradcheck(function, (h, w), atol=1e-7)


def test_entropy_carries_no_gradient_unless_asked() -> None:
    h, w, y = problem()
    h.requires_grad_()
    assert not token_logprobs(h, w, y, entropy="metric")[1].requires_grad
    assert token_logprobs(h, w, y, entropy="grad")[1].requires_grad
    assert token_logprobs(h, w, y)[1].abs().sum() == 0


def test_padded_columns_have_probability_zero() -> None:
    h, w, y = problem(vocab=11)
    padded = torch.cat([w, torch.full((5, w.shape[1]), 9.0, dtype=w.dtype)]).requires_grad_()
    logprob, entropy = token_logprobs(h, padded, y, entropy="grad", vocab_size=11)
    expected = by_log_softmax(h, w, y)
    assert torch.allclose(logprob, expected[0]) and torch.allclose(entropy, expected[1])
    (logprob.sum() + entropy.sum()).backward()
    assert padded.grad is not None and padded.grad[11:].abs().max() == 0 and padded.grad[:11].abs().min() > 0


@pytest.mark.parametrize("level", [-1e4, -300.0, 0.0, 300.0, 1e4])
def test_logits_far_from_zero_stay_exact(level: float) -> None:
    """Adding one number to all logits changes nothing; a running maximum that starts at 0 would give nan."""
    h = torch.tensor([[1.0, level]] * 3)
    w = torch.tensor([[2.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    w.requires_grad_()
    y = torch.tensor([0, 1, 2])
    logprob, entropy = token_logprobs(h, w, y, entropy="grad")
    expected = by_log_softmax(h[:, :1], w.detach()[:, :1], y)
    tolerance = max(1e-6, abs(level) * 2**-22)
    assert (logprob.double() - expected[0]).abs().max() < tolerance
    assert (entropy.double() - expected[1]).abs().max() < tolerance
    (logprob.sum() + entropy.sum()).backward()
    assert torch.isfinite(w.grad).all()


def test_equal_logits_are_uniform() -> None:
    h, w = torch.ones(4, 3), torch.ones(50, 3)
    logprob, entropy = token_logprobs(h, w, torch.tensor([0, 7, 30, 49]), entropy="metric")
    assert logprob.tolist() == pytest.approx([-math.log(50)] * 4, rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(50)] * 4, rel=1e-6)


def test_a_certain_token_keeps_its_gradient() -> None:
    """1 - p of a token with p = 1 - 2e-9: computed from p it would be 0 in fp32."""
    h, w = torch.tensor([[20.0]], requires_grad=True), torch.tensor([[1.0], [0.0]])
    token_logprobs(h, w, torch.tensor([0]))[0].sum().backward()
    assert h.grad is not None and h.grad.item() == pytest.approx(math.exp(-20.0), rel=1e-3)


def test_fp32_logits_are_exact_and_model_logits_are_rounded() -> None:
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


def test_bad_arguments_are_named() -> None:
    h, w, y = problem()
    with pytest.raises(ValueError, match=r"hidden \[T, H\] and weight"):
        token_logprobs(h, w[:, :2], y)
    with pytest.raises(ValueError, match=r"targets \[7\], found \[6\]"):
        token_logprobs(h, w, y[:6])
    with pytest.raises(ValueError, match="fp32 or model, found 'bf16'"):
        token_logprobs(h, w, y, logits="bf16")

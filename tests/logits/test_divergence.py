"""The exact divergence from a second policy, against fp64 and finite differences; equal policies have none."""

import pytest
import torch
from logit_problems import IN_FP32_AND_BF16, problem, relative

from megatron_scalerl.logits import token_loss, torch_backend
from megatron_scalerl.logits.divergence import SecondPolicy

TOKENS, VOCAB = 23, 70


def nothing(logprobs, entropies, places):
    return logprobs.sum() * 0


def policies(dtype):
    """hidden, head and targets of a policy; hidden and head, of another width, of a second one."""
    h, w, y = problem(TOKENS, 16, VOCAB, dtype)
    generator = torch.Generator().manual_seed(7)
    other = [torch.randn(size, 24, generator=generator, dtype=torch.float64).to(dtype) for size in (TOKENS, VOCAB)]
    return h, w, y, other[0], other[1] / 3


def expected(h, w, other_h, other_w, weights, direction, temperature, kept):
    """(divergences, gradients of their weighted sum) by log_softmax in fp64."""
    h, w = h.double().requires_grad_(), w.double().requires_grad_()
    s = (h @ w.t() / temperature).log_softmax(-1)
    t = (other_h.double() @ other_w.double().t() / temperature).log_softmax(-1)
    pair = (s, t) if direction == "reverse" else (t, s)
    divergences = (pair[0].exp() * (pair[0] - pair[1])).sum(-1) * kept
    return divergences.detach(), torch.autograd.grad((divergences * weights.double()).sum(), (h, w))


@pytest.mark.parametrize("chunk", [1, 5, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_value_and_gradients_are_those_of_fp64(direction, dtype, chunk, monkeypatch):
    monkeypatch.setattr(torch_backend, "LARGEST_CHUNK", 3 * chunk * VOCAB)
    h, w, y, other_h, other_w = policies(dtype)
    kept = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) < 0.7
    weights = torch.rand(TOKENS, generator=torch.Generator().manual_seed(2))
    divergences, gradients = expected(h, w, other_h, other_w, weights, direction, 0.7, kept)
    h, w = h.requires_grad_(), w.requires_grad_()
    second = SecondPolicy(hidden=other_h, weight=other_w, token_weights=weights, direction=direction)
    options = dict(places=kept.nonzero()[:, 0], temperature=0.7, grad_logits="bf16x2", second=second)
    value, _, _, found = token_loss(h, w, y, nothing, **options)
    (3.0 * value).backward()
    exact = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    assert relative(found, divergences) < exact and abs(value - (weights.double() * divergences).sum()) < 50 * exact
    for ours, theirs in zip((h.grad, w.grad), gradients):
        assert relative(ours, 3.0 * theirs) < max(exact, 5e-3 * (dtype is torch.bfloat16))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_finite_differences_of_the_loss_and_the_divergence_together(direction):
    h, w, y, other_h, other_w = policies(torch.float64)
    second = SecondPolicy(hidden=other_h, weight=other_w, token_weights=torch.ones(TOKENS), direction=direction)

    def total(h, w):
        return token_loss(h, w, y, lambda logprobs, *_: logprobs.square().sum(), second=second)[0]

    assert torch.autograd.gradcheck(total, (h[:].requires_grad_(), w[:].requires_grad_()), atol=1e-6)


@IN_FP32_AND_BF16
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_equal_policies_have_no_divergence_and_no_gradient_of_it(direction, dtype):
    h, w, y = problem(TOKENS, 16, VOCAB, dtype)
    second = SecondPolicy(hidden=h.clone(), weight=w.clone(), token_weights=torch.ones(TOKENS), direction=direction)
    h, w = h.requires_grad_(), w.requires_grad_()
    value, _, _, divergences = token_loss(h, w, y, nothing, second=second)
    value.backward()
    assert not divergences.any() and not value.any() and not h.grad.any() and not w.grad.any()


def test_the_mean_of_sampled_gaps_has_the_exact_gradient_and_k1_and_k3_in_the_loss_have_not():
    """One position; 100,000 drawn tokens: E[(s - t) grad s] is the reverse divergence's gradient.

    k1 = s - t in the loss has none in expectation (NeMo-RL#2506), k3 = t - s + exp(t - s) - 1 backwards the other
    direction's (TRL#4967).
    """
    h, w, y, other_h, other_w = (each[:1] if each.shape[0] == TOKENS else each for each in policies(torch.float64))
    exact = {}
    for direction in ("reverse", "forward"):
        leaf = h.clone().requires_grad_()
        second = SecondPolicy(hidden=other_h, weight=other_w, token_weights=torch.ones(1), direction=direction)
        token_loss(leaf, w, y, nothing, second=second)[0].backward()
        exact[direction] = leaf.grad[0]
    s = (h @ w.t()).log_softmax(-1)[0]
    t = (other_h @ other_w.t()).log_softmax(-1)[0]
    drawn = torch.multinomial(s.exp(), 100_000, replacement=True, generator=torch.Generator().manual_seed(3))
    # grad of s at token x with respect to the hidden state: w_x - sum p w
    slopes = w[drawn] - s.exp() @ w
    gap = (s - t)[drawn, None]
    estimates = {"gap": gap * slopes, "k1": slopes, "k3": (1 - (-gap).exp()) * slopes}
    unbiased = {"gap": exact["reverse"], "k1": torch.zeros_like(exact["reverse"]), "k3": exact["forward"]}
    for name, gradients in estimates.items():
        error = gradients.std(0) / len(drawn) ** 0.5
        assert ((gradients.mean(0) - unbiased[name]).abs() < 4 * error).all(), name
        off = (gradients.mean(0) - exact["reverse"]).abs()
        assert name == "gap" or (off > 5 * error).any(), name
    assert exact["reverse"].abs().max() > 0.1

"""The Triton kernels over rows of logits, in Triton's interpreter, against fp64."""

import math

import pytest
import torch
from triton_interpreter import bf16_as_on_a_gpu, interpret, truth

from megatron_scalerl.logits import row_kernels
from megatron_scalerl.logits.projection import TokenGradients, no_columns, results
from megatron_scalerl.logits.row_kernels import logit_gradient, row_statistics

ONE = torch.tensor(1.0)


@pytest.fixture(autouse=True)
def small_blocks_in_the_interpreter(monkeypatch):
    interpret(monkeypatch, row_kernels)
    bf16_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(row_kernels, "STATISTICS_BLOCK", 32)
    monkeypatch.setattr(row_kernels, "GRADIENT_BLOCK", 32)


def statistics(z, targets, scale=ONE, first=0):
    stats = no_columns(z.shape[0], z, torch.float32)
    row_statistics(z, scale, targets, first, stats)
    return stats


def assert_true(stats, z, targets, tolerance):
    for found, expected in zip(results(stats), truth(z, targets)):
        assert (found.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("level", [-1e4, -300.0, 0.0, 300.0, 1e4])
def test_statistics_at_any_level(level):
    """A running maximum that starts at 0 would give nan for rows far below it."""
    torch.manual_seed(2)
    z = torch.randn(3, 70) + level
    targets = torch.tensor([0, 33, 69])
    assert_true(statistics(z, targets), z, targets, max(2e-6, abs(level) * 2**-22))


def test_equal_logits_count_one_by_one():
    """All 70 equal: r = 69 in each row, exactly; u = 0."""
    stats = statistics(torch.full((2, 70), -5.0), torch.tensor([0, 69]))
    assert stats.tolist() == [[-5.0] * 2, [69.0] * 2, [0.0] * 2, [-5.0] * 2]


@pytest.mark.parametrize("place", [0, 31, 32, 69])
def test_an_almost_certain_token_keeps_its_logarithm(place):
    """p = 1 / (1 + 69 e^-30): log p = -6.5e-12 is lost where 1 is added to the sum first."""
    z = torch.zeros(1, 70)
    z[0, place] = 30.0
    logprob = results(statistics(z, torch.tensor([place])))[1]
    assert logprob.item() == pytest.approx(-69 * math.exp(-30.0), rel=1e-5)


def test_a_target_elsewhere_is_not_picked():
    """Columns 100..169 of the vocabulary: ids 99 and 170 belong to the neighbours."""
    stats = statistics(torch.randn(4, 70), torch.tensor([99, 100, 169, 170]), first=100)
    assert (stats[3] == torch.finfo(torch.float32).min).tolist() == [True, False, False, True]


def gradients(z, targets, dtype, *, split, entropy):
    """(high, low, exact): dz by the kernel and by autograd in fp64, with a temperature."""
    tokens = z.shape[0]
    scale, g, g_entropy = torch.tensor(0.7), torch.randn(tokens), torch.randn(tokens)
    exact = z.double().requires_grad_()
    lse, logprob, h = truth_with_gradient(exact * scale, targets)
    ((logprob * g).sum() + (h * g_entropy).sum() * entropy).backward()
    high_term = torch.empty_like(z, dtype=dtype) if dtype != z.dtype else z.clone()
    low_term = torch.empty_like(high_term) if split else None
    logit_gradient(
        high_term if dtype == z.dtype else z,
        scale,
        targets,
        0,
        TokenGradients(
            lse=lse.float(),
            logprob=logprob.float(),
            entropy=h.float(),
            grad_logprob=g,
            grad_entropy=g_entropy if entropy else None,
        ),
        -torch.expm1(logprob.float()) * g,
        high_term=high_term,
        low_term=low_term,
    )
    return high_term, low_term, exact.grad


def truth_with_gradient(z, targets):
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return z.logsumexp(-1).detach(), log_p.gather(1, targets[:, None])[:, 0], entropy


def test_a_certain_target_keeps_its_gradient():
    """1 - p = 69 e^-30: from p itself it would be 0."""
    z, target = torch.zeros(1, 70), torch.tensor([40])
    z[0, 40] = 30.0
    high_term, _, exact = gradients(z, target, torch.float32, split=False, entropy=False)
    assert high_term[0, 40].item() == pytest.approx(exact[0, 40].item(), rel=1e-5) and exact[0, 40] != 0

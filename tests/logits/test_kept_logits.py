"""Logits that stay in the workspace until the backward pass: the same gradients as from recomputed ones."""

import pytest
import torch
from logit_problems import IN_FP32_AND_BF16, LiveBytes, gradients_by_log_softmax, leaves, problem, relative
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_scalerl.logits import token_logprobs, token_loss

TOKENS, WIDTH, VOCAB = 60, 16, 500
ALL_LOGITS = 4 * TOKENS * VOCAB


class Products(TorchDispatchMode):
    """Counts the matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def both_passes(dtype, **options):
    """Log-probabilities, entropies and both gradients."""
    h, w, y = leaves(TOKENS, WIDTH, VOCAB, dtype)
    logprob, entropy = token_logprobs(h, w, y % (VOCAB - 7), **options)
    g = torch.linspace(-1.0, 2.0, TOKENS).to(logprob.dtype)
    ((logprob * g).sum() + (entropy * g.flip(0)).sum() * (options.get("entropy") == "grad")).backward()
    return logprob.detach(), entropy.detach(), h.grad, w.grad


@pytest.mark.parametrize(
    "dtype, grad_logits, bound",
    [
        (torch.float64, "fp32", 1e-13),
        (torch.float32, "fp32", 1e-6),
        (torch.bfloat16, "bf16", 1e-2),
        (torch.bfloat16, "bf16x2", 1e-2),
        (torch.bfloat16, "fp32", 1e-2),
    ],
)
@pytest.mark.parametrize("entropy", ["metric", "grad"])
def test_results_are_those_of_recomputed_logits(dtype, grad_logits, bound, entropy):
    """Also with a padded vocabulary, tokens without loss and a temperature."""
    options = dict(
        entropy=entropy,
        grad_logits=grad_logits,
        vocab_size=VOCAB - 7,
        places=torch.arange(2, TOKENS, 3),
        temperature=0.7,
    )
    kept, recomputed = (both_passes(dtype, keep_logits=keep, **options) for keep in (True, False))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(kept[:2], recomputed[:2]))
    assert all(relative(a, b.double()) < bound for a, b in zip(kept[2:], recomputed[2:]))


def kept(h, w, y, **options):
    return token_logprobs(h, w, y, keep_logits=True, **options)[0].sum()


def in_the_chunk(h, w, y, **options):
    return token_loss(h, w, y, lambda lp, e, i: lp.sum(), **options)[0]


@pytest.mark.parametrize(
    "total, products", [(kept, 3), (in_the_chunk, 3), (lambda *given: token_logprobs(*given)[0].sum(), 4)]
)
def test_one_product_less(total, products):
    h, w, y = problem(TOKENS, WIDTH, VOCAB, torch.float32)
    with Products() as counted:
        total(h.requires_grad_(), w.requires_grad_(), y).backward()
    assert counted.count == products


def test_another_backward_pass_recomputes_them():
    h, w, y = leaves()
    total = kept(h, w, y)
    first = torch.autograd.grad(total, (h, w), retain_graph=True)
    second = torch.autograd.grad(total, (h, w))
    exact = gradients_by_log_softmax(h, w, y, torch.ones(len(y)))
    for found in (first, second):
        assert all(relative(a, b) < 1e-12 for a, b in zip(found, exact))


@pytest.mark.parametrize(
    "reason, workspace, largest", [("workspace", ALL_LOGITS, 2**25), ("size", 2**30, TOKENS * VOCAB - 1)]
)
def test_not_kept_where_they_do_not_fit(monkeypatch, reason, workspace, largest):
    """The workspace bounds both passes, and on a CPU the size of a chunk."""
    monkeypatch.setattr("megatron_scalerl.logits.torch_backend.LARGEST_CHUNK", largest)
    h, w, y = leaves(TOKENS, WIDTH, VOCAB, torch.float32)
    with LiveBytes() as live:
        pair = token_logprobs(h, w, y, keep_logits=True, workspace_mb=workspace / 2**20)
    assert pair[0].requires_grad and live.now < ALL_LOGITS / 4, reason


def test_kept_only_for_a_backward_pass():
    h, w, y = leaves(TOKENS, WIDTH, VOCAB, torch.float32)
    with LiveBytes() as live:
        pair = token_logprobs(h, w, y, keep_logits=True)
        assert live.now >= ALL_LOGITS
        pair[0].sum().backward()
        assert live.now < ALL_LOGITS
    with torch.no_grad(), LiveBytes() as live, Products() as counted:
        token_logprobs(h, w, y, keep_logits=True)
    assert counted.count == 1 and live.now < ALL_LOGITS / 4


@pytest.mark.parametrize("workspace", [2**17, 2**18, 2**19])
@IN_FP32_AND_BF16
@pytest.mark.parametrize("total", [kept, in_the_chunk])
def test_the_workspace_bounds_both_passes(total, dtype, workspace):
    h, w, y = leaves(TOKENS, WIDTH, VOCAB, dtype)
    with LiveBytes() as live:
        value = total(h, w, y, workspace_mb=workspace / 2**20)
        if total is in_the_chunk:
            assert live.now < 4 * (h.numel() + w.numel()) + 160 * TOKENS, "nothing of the logits lives"
        value.backward()
    grads = 4 * h.numel() + (4 if total is in_the_chunk else 0) * w.numel() + 2 * w.element_size() * w.numel()
    assert live.peak < workspace + grads + 160 * TOKENS

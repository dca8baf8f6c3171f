"""The loss inside the chunk: the value and the gradients of the two-pass way, from one computation of the logits."""

import pytest
import torch
from logit_problems import as_megatron_parameter, leaves, relative

from megatron_scalerl.logits import token_logprobs, token_loss
from megatron_scalerl.losses import LOSSES, LossInputs, is_separable, make_loss

TOKENS = 50


def rows(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return dict(
        rollout_logprobs=-3.0 * torch.rand(TOKENS, generator=generator),
        advantages=torch.randn(TOKENS, generator=generator),
        loss_mask=torch.rand(TOKENS, generator=generator) < 0.8,
        token_weights=torch.rand(TOKENS, generator=generator),
        sequence_ids=torch.arange(TOKENS) // 10,
    )


@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", filter(is_separable, LOSSES))
def test_equals_two_passes(name, dtype, chunk, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.logits.torch_backend.LARGEST_CHUNK", chunk * 70)
    loss, columns = make_loss(name, {"max_is_weight": 1.5} if name == "cispo" else {}), rows()
    h, w, y = leaves(TOKENS, 16, 70, dtype)
    places = columns["loss_mask"].nonzero()[:, 0]
    options = dict(entropy="metric", places=places, temperature=0.7, grad_logits="bf16x2")
    logprobs, entropies = token_logprobs(h, w, y, **options)
    expected = loss(LossInputs(trainer_logprobs=logprobs, **columns)).loss
    (3.0 * expected).backward()
    two_pass = h.grad, w.grad
    h, w, y = leaves(TOKENS, 16, 70, dtype)
    shown = []

    def of_chunk(logprobs, entropies, places):
        shown.extend(places.tolist())
        assert len(places) <= chunk
        return loss(LossInputs(trainer_logprobs=logprobs, **{k: v[places] for k, v in columns.items()})).loss

    value, *pair = token_loss(h, w, y, of_chunk, **options)
    (3.0 * value).backward()
    assert shown == places.tolist()
    exact = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    assert abs(value - expected) < exact * 10 and abs(expected) > 0.01
    assert torch.allclose(pair[0], logprobs, atol=10 * exact) and torch.allclose(pair[1], entropies, atol=10 * exact)
    assert not pair[0].requires_grad and not pair[1].requires_grad
    for ours, theirs in zip((h.grad, w.grad), two_pass):
        assert relative(ours, theirs.double()) < max(exact, 5e-3 * (dtype is torch.bfloat16))


@pytest.mark.parametrize("masked", [False, True])
def test_without_room_for_a_row_the_logits_are_computed_twice(masked):
    """The loss is then of all its tokens at once, and a kept scalar scales both gradients as it does in chunks."""
    found = []
    kept = torch.tensor([1, 2, 4, 5, 7]) if masked else None
    shown = []

    def loss(logprobs, entropies, places):
        shown[:] = places.tolist()
        return (logprobs * (1 + places)).sum() + entropies.sum()

    for room in (0.01, 512.0):
        h, w, y = leaves(tokens=8, hidden=2, vocab=5000)
        value, *pair = token_loss(h, w, y, loss, workspace_mb=room, entropy="grad", places=kept)
        (3.0 * value).backward()
        assert shown == ([*range(8)] if kept is None else kept.tolist())
        assert not any(each.requires_grad for each in pair)
        found.append((value.detach(), *pair, h.grad, w.grad))
    assert all(relative(twice, once) < 1e-12 for twice, once in zip(*found))


def test_without_a_gradient_there_is_only_the_value():
    h, w, y = leaves(TOKENS, 16, 70, torch.float32)
    with torch.no_grad():
        value, logprobs, _ = token_loss(h, w, y, lambda lp, e, i: lp.sum())
    assert not value.requires_grad and value == pytest.approx(float(logprobs.sum()), rel=1e-6)


def test_no_token_with_loss():
    h, w, y = leaves(TOKENS, 16, 70, torch.float32)
    value, logprobs, _ = token_loss(h, w, y, lambda lp, e, i: lp.sum(), places=torch.empty(0, dtype=torch.int64))
    value.backward()
    assert value == 0 and logprobs.abs().sum() == 0 and h.grad.abs().sum() == 0 and w.grad.abs().sum() == 0


def test_main_grad_gets_the_scaled_gradient_once_per_backward():
    h, w, y = (t.detach() for t in leaves(TOKENS, 16, 70, torch.bfloat16))
    head, plain = as_megatron_parameter(w), as_megatron_parameter(w)
    for scale in (0.5, 2.0):
        value, _, _ = token_loss(h, head, y, lambda lp, e, i: lp.sum(), grad_logits="fp32")
        assert head.main_grad.abs().sum() == 0 or scale == 2.0
        (scale * value).backward()
    assert head.grad_added_to_main_grad
    (2.5 * token_logprobs(h, plain, y, grad_logits="fp32")[0].sum()).backward()
    assert relative(head.main_grad, plain.main_grad.double()) < 1e-6

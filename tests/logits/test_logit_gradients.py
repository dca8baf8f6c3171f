"""How exact gradients are for each way that the logits' gradient enters the GEMMs, and where they are added up."""

import pytest
import torch
from logit_problems import as_megatron_parameter, gradients_by_log_softmax, problem, relative

from megatron_scalerl.logits import token_logprobs
from megatron_scalerl.logits.exact import fp32_products

TOKENS, WIDTH, VOCAB = 256, 64, 1500
BOUNDS = {"bf16": 3e-3, "bf16x2": 1e-5, "fp32": 2e-6}
"""Relative error of the head's gradient before it is rounded to the head's own type."""


def gradients(dtype, grad_logits, **options):
    """Gradients of hidden and of the head (the latter in fp32), and the exact ones."""
    h, w, y = problem(TOKENS, WIDTH, VOCAB, dtype, top=20.0)
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    head = as_megatron_parameter(w)
    h.requires_grad_()
    pair = token_logprobs(h, head, y, entropy="grad", grad_logits=grad_logits, workspace_mb=1.0, **options)
    (pair[0] @ weights[0] + pair[1] @ weights[1]).backward()
    return h.grad, head.main_grad, gradients_by_log_softmax(h, w, y, *weights)


@pytest.mark.parametrize("grad_logits", BOUNDS)
def test_error_of_a_bf16_head_s_gradient(grad_logits):
    grad_h, grad_w, expected = gradients(torch.bfloat16, grad_logits)
    assert grad_w.dtype == torch.float32 and relative(grad_w, expected[1]) < BOUNDS[grad_logits]
    assert grad_h.dtype == torch.bfloat16 and relative(grad_h, expected[0]) < 3.5e-3


@pytest.mark.parametrize("grad_logits", BOUNDS)
def test_fp32_operands_keep_an_fp32_gradient(grad_logits):
    grad_h, grad_w, expected = gradients(torch.float32, grad_logits)
    assert relative(grad_w, expected[1]) < 2e-6 and relative(grad_h, expected[0]) < 2e-6


@pytest.mark.parametrize("switched", ["bf16", "tf32"])
def test_what_the_user_lets_matmul_do_does_not_reach_the_logits(switched):
    """On a CPU with a bf16 or TF32 unit the user's setting costs fp32 logits 1e-2; it is as it was afterwards."""
    expected = gradients(torch.float32, "fp32")
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = switched
    try:
        found = gradients(torch.float32, "fp32")
        assert switch.fp32_precision == switched
        gradients(torch.bfloat16, "bf16")
        assert switch.fp32_precision == switched
    finally:
        switch.fp32_precision = before
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_the_user_s_setting_is_put_back_after_an_error():
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    with pytest.raises(RuntimeError), fp32_products(torch.device("cpu"), of_bf16=True):
        assert switch.fp32_precision == "bf16"
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert switch.fp32_precision == before


def test_products_of_bf16_numbers_are_exact_in_any_mode():
    """Integers up to 8 in every place: all sums are below 2^24, so every order gives the same bits."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-8, 9, shape, generator=generator).float() for shape in ((70, 512), (512, 90)))
    with fp32_products(torch.device("cpu"), of_bf16=True):
        fast = a @ b
    assert torch.equal(fast, (a.double() @ b.double()).float())


def test_padding_gets_nothing_in_main_grad():
    h, w, y = problem(dtype=torch.float32)
    head = as_megatron_parameter(w)
    head.main_grad.fill_(0.5)
    token_logprobs(h, head, y % 9, vocab_size=9)[0].sum().backward()
    assert (head.main_grad[9:] == 0.5).all() and (head.main_grad[:9] != 0.5).all()


@pytest.mark.parametrize("rows, where", [(11, "main_grad"), (10, "grad"), (None, "grad")])
def test_where_the_gradient_goes(rows, where):
    """Into a main_grad of the weight's shape, if there is one."""
    h, w, y = problem(dtype=torch.float32)
    head = as_megatron_parameter(w)
    head.main_grad = None if rows is None else torch.zeros(rows, w.shape[1])
    token_logprobs(h, head, y)[0].sum().backward()
    assert head.grad.shape == head.shape
    _, expected = gradients_by_log_softmax(h, w, y, torch.ones(7))
    assert relative(getattr(head, where), expected) < 1e-6
    assert head.grad_added_to_main_grad == (where == "main_grad")
    if where == "grad" and rows:
        assert head.main_grad.abs().sum() == 0


def test_an_embedding_tied_in_one_stage_gets_a_stand_in_of_zeros():
    """Autograd adds the stand-in to the embedding's own gradient, and DDP's hook adds the sum to main_grad."""
    h, w, y = problem(dtype=torch.float32)
    head = as_megatron_parameter(w)
    head.zero_out_wgrad = True
    (token_logprobs(h, head, y)[0].sum() + head[3].sum()).backward()
    assert torch.equal(head.grad, torch.zeros_like(w).index_fill_(0, torch.tensor([3]), 1.0))

"""The GPU backends on a GPU against the torch backend on the CPU and against fp64. Left out where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_scalerl.logits import token_logprobs
from megatron_scalerl.logits.choice import chosen_backend, load_backend
from megatron_scalerl.logits.merge import merged, results
from megatron_scalerl.logits.projection import Projection

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCAB = 700, 320, 5003
BOTH = pytest.mark.parametrize("backend", ["cuda", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture
def gpu() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On the CPU; targets on the edges of blocks of 256 columns and of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (0.2 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype)
    targets = torch.tensor([0, 255, 256, 511, 512, 4095, 4096, VOCAB - 1]).repeat(TOKENS)[:TOKENS]
    return hidden, weight, targets


def run(device: torch.device, backend: str, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies, gradients of hidden and head (fp32 main_grad), on the CPU."""
    hidden, weight, targets = (t.to(device) for t in problem(dtype))
    hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(VOCAB, WIDTH, device=device), False
    temperature = torch.linspace(0.5, 2.0, TOKENS, device=device)
    options = {"entropy": "grad", "temperature": temperature, "main_grad": True, "backend": backend, **options}
    logprob, entropy = token_logprobs(hidden, weight, targets, **options)
    g = torch.linspace(-1.0, 2.0, TOKENS, device=device)
    ((logprob * g).sum() + (entropy * g.flip(0)).sum()).backward()
    return tuple(t.detach().cpu() for t in (logprob, entropy, hidden.grad, weight.main_grad))


def truth(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The same in fp64."""
    hidden, weight, targets = problem(dtype)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (h @ w.t() / torch.linspace(0.5, 2.0, TOKENS)[:, None].double()).log_softmax(-1)
    g = torch.linspace(-1.0, 2.0, TOKENS).double()
    logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((logprob * g).sum() + (entropy * g.flip(0)).sum()).backward()
    return logprob.detach(), entropy.detach(), h.grad, w.grad


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@BOTH
@pytest.mark.parametrize("workspace", [512.0, 2.0])
@pytest.mark.parametrize(("mode", "bound"), [("bf16", 3e-3), ("bf16x2", 1e-5), ("fp32", 1e-5)])
def test_bf16_head_against_fp64(gpu: torch.device, backend: str, workspace: float, mode: str, bound: float) -> None:
    found = run(gpu, backend, torch.bfloat16, grad_logits=mode, workspace_mb=workspace)
    exact = truth(torch.bfloat16)
    assert (found[0] - exact[0]).abs().max() < 5e-5 and (found[1] - exact[1]).abs().max() < 5e-5
    assert relative(found[3], exact[3]) < bound and relative(found[2], exact[2]) < 4e-3


@BOTH
@DTYPES
def test_equals_the_torch_backend_on_the_cpu(gpu: torch.device, backend: str, dtype: torch.dtype) -> None:
    found = run(gpu, backend, dtype, grad_logits="fp32")
    expected = run(torch.device("cpu"), "torch", dtype, grad_logits="fp32")
    assert all((a - b).abs().max() < 5e-5 for a, b in zip(found[:2], expected[:2]))
    assert relative(found[3], expected[3]) < 1e-5
    assert relative(found[2], expected[2]) < (1e-5 if dtype == torch.float32 else 4e-3)


@BOTH
def test_fp32_operands_meet_no_tf32(gpu: torch.device, backend: str) -> None:
    """Even where the user has allowed it: TF32 logits would be off by 1e-3; and the setting is put back."""
    torch.set_float32_matmul_precision("high")
    try:
        found = run(gpu, backend, torch.float32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    exact = truth(torch.float32)
    assert (found[0] - exact[0]).abs().max() < 5e-5 and relative(found[3], exact[3]) < 1e-5


@BOTH
@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_any_level_stays_finite(gpu: torch.device, backend: str, level: float) -> None:
    hidden, weight, targets = (t.to(gpu) for t in problem(torch.float32))
    hidden[:, 0], weight[:, 0] = 1.0, level
    weight.requires_grad_()
    logprob, entropy = token_logprobs(hidden, weight, targets, entropy="grad", backend=backend)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.isfinite().all() and weight.grad is not None and weight.grad.isfinite().all()
    assert (logprob <= 0).all() and (entropy >= 0).all()


@BOTH
@DTYPES
def test_two_shards_give_what_one_does(gpu: torch.device, backend: str, dtype: torch.dtype) -> None:
    hidden, weight, targets = (t.to(gpu) for t in problem(dtype))
    p = Projection(
        hidden=hidden,
        weight=weight,
        targets=targets,
        scale=torch.tensor(1.0, device=gpu),
        first=0,
        round_logits=False,
        entropy=True,
        entropy_grad=False,
        grad_logits="bf16",
        workspace_bytes=2**24,
    )
    half = replace(p, weight=weight[:2500]), replace(p, weight=weight[2500:], first=2500)
    chosen = load_backend(backend, gpu, dtype)
    whole = results(chosen.statistics(p))
    parts = results(merged(torch.stack([chosen.statistics(shard) for shard in half])))
    assert all((a - b).abs().max() < 5e-5 for a, b in zip(whole, parts))


def test_the_workspace_bounds_the_allocator(gpu: torch.device) -> None:
    """64 MiB for logits that take 1,002 MiB; beside it gradients and numbers per token."""
    hidden = torch.randn(8192, WIDTH, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32064, WIDTH, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32064, (8192,), device=gpu)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    token_logprobs(hidden, weight, targets, workspace_mb=64, backend="cuda")[0].sum().backward()
    extra = torch.accelerator.max_memory_allocated() - before
    beside = 2 * weight.numel() + 6 * hidden.numel() + 100 * 4 * 8192
    assert extra < 64 * 2**20 + beside + 32 * 2**20  # cuBLAS keeps a workspace of its own


def test_auto_takes_the_row_kernels(gpu: torch.device) -> None:
    assert chosen_backend(gpu, torch.bfloat16) == "cuda" and chosen_backend(gpu, torch.float64) == "torch"

"""The logit projection's backends compared with fp64 and with the torch backend on the CPU, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_scalerl.logits import token_logprobs
from megatron_scalerl.logits.choice import load_backend
from megatron_scalerl.logits.projection import Projection, merged, results

TOKENS, WIDTH, VOCAB = 700, 320, 5003
NATS = 5e-5
"""Bound on log-probs and entropies, documented in `logits.api`."""
GRADIENT_BOUNDS = {"bf16": 3e-3, "bf16x2": 1e-5, "fp32": 1e-5}
"""Relative bound on the head's gradient by `grad_logits`, documented in `logits.api`."""
ROUNDED = 4e-3
"""Relative bound on a gradient that is rounded to bf16."""

ALLOCATOR_BYTES = 4 * 2**20
"""PyTorch's allocator does not split a free block if less than 1 MiB would remain; up to four are in use."""


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H], head [V, H], targets [T] on the CPU; targets at block and vocabulary boundaries."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (0.2 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype)
    targets = torch.tensor([0, 255, 256, 511, 512, 4095, 4096, VOCAB - 1]).repeat(TOKENS)[:TOKENS]
    return hidden, weight, targets


def computed(device: torch.device, backend: str, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies [T], gradients of hidden [T, H] and of the head [V, H] (fp32), on the CPU."""
    hidden, weight, targets = (t.to(device) for t in problem(dtype))
    hidden.requires_grad_(), weight.requires_grad_()
    grad = torch.zeros(VOCAB, WIDTH, device=device)
    weight.main_grad, weight.grad_added_to_main_grad = grad, False  # type: ignore[attr-defined]
    temperature = torch.linspace(0.5, 2.0, TOKENS, device=device)
    options = {"entropy": "grad", "temperature": temperature, "main_grad": True, "backend": backend, **options}
    logprob, entropy = token_logprobs(hidden, weight, targets, **options)
    g = torch.linspace(-1.0, 2.0, TOKENS, device=device)
    ((logprob * g).sum() + (entropy * g.flip(0)).sum()).backward()
    assert hidden.grad is not None
    return tuple(t.detach().cpu() for t in (logprob, entropy, hidden.grad, grad))


def exact(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same in fp64."""
    hidden, weight, targets = problem(dtype)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (h @ w.t() / torch.linspace(0.5, 2.0, TOKENS)[:, None].double()).log_softmax(-1)
    g = torch.linspace(-1.0, 2.0, TOKENS).double()
    logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((logprob * g).sum() + (entropy * g.flip(0)).sum()).backward()
    assert h.grad is not None and w.grad is not None
    return logprob.detach(), entropy.detach(), h.grad, w.grad


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def shares_of_bounds(device: torch.device, backend: str) -> dict[str, float]:
    """Errors of the projection relative to their documented bounds, by case; all should be at most 1.

    Keys name dtype, gradient mode and workspace. On a GPU the fp32 cases also detect TF32.
    """
    found: dict[str, float] = {}
    references = {dtype: exact(dtype) for dtype in (torch.bfloat16, torch.float32)}
    for mode, bound in GRADIENT_BOUNDS.items():
        for workspace in (512.0, 2.0):
            values = computed(device, backend, torch.bfloat16, grad_logits=mode, workspace_mb=workspace)
            key = f"bf16, gradient {mode}, {workspace:g} MiB"
            found[key] = _share(values, references[torch.bfloat16], bound, ROUNDED)
    for dtype, bound in ((torch.bfloat16, ROUNDED), (torch.float32, 1e-5)):
        values = computed(device, backend, dtype, grad_logits="fp32")
        on_cpu = computed(torch.device("cpu"), "torch", dtype, grad_logits="fp32")
        name = str(dtype).removeprefix("torch.")
        found[f"{name} against the torch backend on the CPU"] = _share(values, on_cpu, 1e-5, bound)
        found[f"{name}, two shards"] = _shards(device, backend, dtype)
    for level in (-1e4, 1e4):
        found[f"logits near {level:g}"] = 0.0 if stays_finite(device, backend, level) else float("inf")
    return found


def _share(values: tuple[Tensor, ...], expected: tuple[Tensor, ...], head: float, hidden: float) -> float:
    nats = max((a - b).abs().max().item() for a, b in zip(values[:2], expected[:2]))
    return max(nats / NATS, relative(values[3], expected[3]) / head, relative(values[2], expected[2]) / hidden)


def tf32_share(device: torch.device, backend: str) -> float:
    """Error with fp32 operands and TF32 allowed by the user, relative to its bound; inf if the setting changed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = computed(device, backend, torch.float32)
        kept = torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    return _share(found, exact(torch.float32), 1e-5, 1e-5) if kept else float("inf")


def stays_finite(device: torch.device, backend: str, level: float) -> bool:
    """True if log-probs, entropies and gradients stay finite and keep their signs for logits shifted by `level`."""
    hidden, weight, targets = (t.to(device) for t in problem(torch.float32))
    hidden[:, 0], weight[:, 0] = 1.0, level
    weight.requires_grad_()
    logprob, entropy = token_logprobs(hidden, weight, targets, entropy="grad", backend=backend)
    (logprob.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    finite = logprob.isfinite().all() and weight.grad.isfinite().all()
    return bool(finite and (logprob <= 0).all() and (entropy >= 0).all())


def _shards(device: torch.device, backend: str, dtype: torch.dtype) -> float:
    hidden, weight, targets = (t.to(device) for t in problem(dtype))
    whole = Projection(
        hidden=hidden,
        weight=weight,
        targets=targets,
        scale=torch.tensor(1.0, device=device),
        first=0,
        round_logits=False,
        entropy=True,
        entropy_grad=False,
        grad_logits="bf16",
        workspace_bytes=2**24,
    )
    half = replace(whole, weight=weight[:2500]), replace(whole, weight=weight[2500:], first=2500)
    chosen = load_backend(backend, device, dtype)
    one = results(chosen.statistics(whole))
    two = results(merged(torch.stack([chosen.statistics(shard) for shard in half])))
    return max((a - b).abs().max().item() for a, b in zip(one, two)) / NATS


def memory_over_bound(device: torch.device, backend: str) -> float:
    """Device memory of one forward and backward pass relative to the bound for a workspace of 64 MiB (at most 1).

    The logits of the 8,192 tokens would take 1,002 MiB. A first pass allocates what libraries keep: cuBLAS's
    workspace.
    """
    hidden = torch.randn(8192, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32064, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32064, (8192,), device=device)
    before = 0
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        token_logprobs(hidden, weight, targets, workspace_mb=64, backend=backend)[0].sum().backward()
    extra = torch.accelerator.max_memory_allocated() - before
    beside = 2 * weight.numel() + 6 * hidden.numel() + 100 * 4 * 8192
    return extra / (64 * 2**20 + beside + ALLOCATOR_BYTES)

"""The one entrance to the logit projection; backends stand behind it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from megatron_scalerl.logits import torch_backend

Precision = Literal["fp32", "model"]
Entropy = Literal["none", "metric", "grad"]


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    logits: Precision = "fp32",
    temperature: float | torch.Tensor = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `targets` and entropy of the distribution, both [T] fp32 (fp64 for fp64 input), nats.

    hidden [T, H], weight [V/p, H] (this rank's rows of the head), targets [T] (global token ids); `group` is
    the tensor-parallel group of size p, hidden and targets are the same on all its ranks, and so are the
    results, bit for bit. Columns from `vocab_size` (the true size, default all) are padding and have
    probability 0. `temperature` divides the logits, one number or [T].

    logits "fp32": products exact, accumulated in fp32, logits never rounded below fp32 (Khatri et al. 2025,
    arXiv 2510.13786, section 3.2). "model": logits rounded to the model's dtype first, as an engine without an
    fp32 head gives them. entropy "none": zeros; "metric": without gradient; "grad": differentiable.
    Memory beyond inputs and gradients is a few [chunk_tokens, V/p] blocks; the backward pass computes the
    logits again. Raises ValueError for a shape or an option that does not fit.
    """
    _check(hidden, weight, targets, logits, entropy)
    if chunk_tokens is None:
        chunk_tokens = max(1, torch_backend.CHUNK_ELEMENTS // max(1, weight.shape[0]))
    options = torch_backend.Options(
        group=group if group is not None and group.size() > 1 else None,
        round_logits=logits == "model",
        entropy=entropy != "none",
        entropy_grad=entropy == "grad",
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
    )
    scale = torch.as_tensor(1.0 / temperature, device=hidden.device)
    return torch_backend.TokenLogprobs.apply(hidden, weight, targets, scale, options)


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, logits: str, entropy: str) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"token_logprobs: expected hidden [T, H] and weight [V/p, H], found {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"token_logprobs: expected targets [{hidden.shape[0]}], found {list(targets.shape)}")
    if logits not in ("fp32", "model"):
        raise ValueError(f"token_logprobs: logits: expected fp32 or model, found {logits!r}")
    if entropy not in ("none", "metric", "grad"):
        raise ValueError(f"token_logprobs: entropy: expected none, metric or grad, found {entropy!r}")

"""What one rank of the vocabulary-parallel logit tests does."""

from __future__ import annotations

import torch

VOCAB = 10


def problem(level: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    h = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    w = torch.randn(VOCAB, 6, generator=generator, dtype=torch.float64)
    h[:, 0], w[:, 0] = 1.0, level
    return h.to(dtype), w.to(dtype), torch.arange(9) % VOCAB


def both_dtypes(cases: list[tuple[float, int]]) -> list[dict[str, torch.Tensor]]:
    """For each (level of the logits, padded vocabulary) and fp64, fp32: results and gradients of this rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [
        run(level, padded, dtype, dist.group.WORLD)
        for level, padded in cases
        for dtype in (torch.float64, torch.float32)
    ]


def run(level: float, padded: int, dtype: torch.dtype, group: object = None) -> dict[str, torch.Tensor]:
    """Log-probabilities, entropies and the gradients of a weighted sum; `padded` rows in all, cut over the group."""
    from megatron_scalerl.logits import token_logprobs

    h, w, y = problem(level, dtype)
    full = torch.cat([w, w.new_full((padded - VOCAB, w.shape[1]), 5.0)])
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    rows = padded // size
    mine = full[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    h.requires_grad_()
    logprob, entropy = token_logprobs(h, mine, y, group=group, entropy="grad", vocab_size=VOCAB, workspace_mb=0.002)
    weights = torch.linspace(-1.0, 2.0, 9, dtype=logprob.dtype)
    ((logprob * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
    return dict(logprob=logprob.detach(), entropy=entropy.detach(), grad_h=h.grad, grad_w=mine.grad)

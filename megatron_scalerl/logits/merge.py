"""Merging the statistics of parts of the vocabulary: blocks of columns on one rank, and the ranks of a group.

The statistics [4, T] are those of `projection.Backend`. Merging is a fixed sequence of operations in the order of
the parts, so ranks with the same parts get the same bits. The maximum's own term is not part of r: log1p(r) keeps
the log-probability of a token that is almost certain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_scalerl.shapes import Float


def no_columns(tokens: int, like: Tensor, dtype: torch.dtype) -> Float[Tensor, "4 tokens"]:
    """The statistics of zero columns, the start of a merge (a maximum below all others)."""
    stats = like.new_zeros((4, tokens), dtype=dtype)
    stats[0] = torch.finfo(dtype).min
    stats[1] = -1.0
    stats[3] = torch.finfo(dtype).min
    return stats


def merged(parts: Float[Tensor, "p 4 T"]) -> Float[Tensor, "4 T"]:
    """The statistics of all columns from those of each part, in the order of the parts."""
    m, rest, u, target = parts.unbind(1)
    top, owner = m.max(dim=0)
    others, centered = torch.zeros_like(top), torch.zeros_like(top)
    for part in range(m.shape[0]):
        terms = 1.0 + rest[part]
        gap = torch.where(terms > 0, m[part] - top, torch.zeros_like(top))
        weight = gap.exp()
        others = others + torch.where(owner == part, rest[part], weight * terms)
        centered = centered + weight * (u[part] + gap * terms)
    return torch.stack([top, others, centered, target.amax(dim=0)])


def results(
    stats: Float[Tensor, "4 T"],
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-sum-exp, log-probability of the target and entropy (nats) of the whole vocabulary.

    The entropy log s - u / s is centered on the maximum: lse minus the mean logit would cancel.
    """
    top, others, centered, target = stats
    log_total = others.log1p()
    return top + log_total, (target - top) - log_total, log_total - centered / (1.0 + others)

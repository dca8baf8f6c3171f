"""RMS norms: one for sequence parallelism, and one without weights for queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension whose weight gradient is summed over the tensor-parallel group.

    Megatron's own torch norm refuses sequence parallelism (transformer/torch_norm.py:32); its gradient reduction
    checks the attribute `sequence_parallel` of the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class HeadRMSNorm(torch.nn.Module):
    """Weightless RMS norm over each head, computed in fp32 (Llama 4's query and key norm).

    Megatron's own (transformer/torch_norm.py:72) uses torch.compile, which requires a C++ compiler.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] to [..., d] with mean square 1."""
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x)

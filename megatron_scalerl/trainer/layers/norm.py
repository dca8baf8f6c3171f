"""RMS norms: with sequence parallelism, of queries and keys (each head or all heads), of a linear layer's result."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension whose weight gradient is summed over the tensor-parallel group.

    Megatron's own torch norm refuses sequence parallelism (transformer/torch_norm.py:50); Megatron's gradient
    reduction checks the attribute `sequence_parallel` of the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class HeadRMSNorm(torch.nn.Module):
    """Weightless RMS norm over each head, computed in fp32 (Llama 4's query and key norm).

    Megatron's norm (transformer/torch_norm.py:90) uses torch.compile, which requires a C++ compiler.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale x [..., d] to mean square 1 over the last dimension."""
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x)


class AllHeadsRMSNorm(torch.nn.Module):
    """RMS norm of all heads of a token together, which tensor-parallel ranks share (OLMo 2's query and key norm).

    Every rank has the weights of all heads; Megatron sums the weights' gradients over the ranks, as for every query
    and key norm (distributed/finalize_model_grads.py:453).
    """

    heads: int
    """Number of heads of all ranks together."""
    group: Any
    """The tensor-parallel process group."""

    @classmethod
    def of_heads(cls, heads: int, group: Any) -> type:
        """A subclass with `heads` and `group` set, because Megatron's specs take classes."""
        return type(cls.__name__, (cls,), {"heads": heads, "group": group})

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float):
        """hidden_size: width of one head, which Megatron's attention passes under this name."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(self.heads * hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale x [..., heads of this rank, d] to mean square 1 over the heads of all ranks, times the weight."""
        squares = x.float().square().sum(dim=(-2, -1), keepdim=True)
        # `reduce` sums over the ranks in the forward pass, `copy` in the backward pass. Both sums are needed, since
        # the result of every rank depends on the mean square over all ranks.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        weight = self.weight.view(-1, *x.shape[-2:])[self.group.rank()]
        return (weight * (x.float() * torch.rsqrt(squares / self.weight.numel() + self.eps))).type_as(x)


def with_norm(linear: type, norm: Any) -> type:
    """A subclass of the linear layer `linear` that applies `norm` to the result."""

    class WithNorm(linear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **keywords: Any):
            super().__init__(input_size, output_size, config=config, **keywords)
            self.norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, *args: Any) -> Any:
            result, bias = super().forward(*args)
            assert bias is None, "a norm after a linear layer with a bias is not supported"
            return self.norm(result), None

    return WithNorm

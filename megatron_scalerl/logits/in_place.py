"""The logit projection on a GPU with a chunk's gradient written over its logits: two large GEMMs for each chunk.

A row's bf16 gradient takes the first half of its fp32 logits, so a chunk needs no other block, and the gradients of
head and hidden states are one GEMM each, with rows 2 V apart. For the loss in the chunk and for kept logits in bf16;
everything else is that of `cuda_backend`. Selected by name only: it has not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_scalerl.logits.cuda_backend import CudaBackend, GradientMaker, add_gradients
from megatron_scalerl.logits.exact import fp32_products
from megatron_scalerl.logits.projection import Projection, TokenGradients
from megatron_scalerl.logits.row_kernels import derivative

BLOCK = 4096
"""Columns that a program reads before it writes their gradient: 16 for each thread of 8 warps."""


def gradient_in_place(
    logits: Tensor,
    scale: Tensor,
    targets: Tensor,
    first: int,
    *,
    lse: Tensor,
    grad_logprob: Tensor,
    at_target: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The gradient [T, columns] of fp32 logits in bf16, as a view of their memory; arguments as `logit_gradient`."""
    tokens, columns = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    _gradient_in_place_kernel[(tokens,)](
        logits,
        logits.stride(0),
        scale,
        scale.dim(),
        targets,
        lse,
        grad_logprob,
        at_target,
        entropy,
        entropy if grad_entropy is None else grad_entropy,
        first,
        columns,
        ENTROPY=grad_entropy is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=8,
        num_stages=1,
    )
    return logits.view(torch.bfloat16)[:, :columns]


@triton.jit
def _gradient_in_place_kernel(
    logits,
    row_stride,
    scale,
    scale_stride,
    targets,
    lse,
    grad_logprob,
    at_target,
    entropy,
    grad_entropy,
    first,
    columns,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    out = start.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    factor = tl.load(scale + row * scale_stride)
    target = tl.load(targets + row) - first
    total, certain, g = tl.load(lse + row), tl.load(at_target + row), tl.load(grad_logprob + row)
    h, g_entropy = tl.load(entropy + row), tl.load(grad_entropy + row)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(start + column, mask=inside, other=0.0) * factor
        # Bytes 2 begin to 2 (begin + BLOCK) are overwritten: other warps must have read theirs, of this block
        # (begin = 0) or of the one before. What a later block reads lies behind all that is written until then.
        tl.debug_barrier()
        dz = derivative(z, column == target, total, certain, g, h, g_entropy, ENTROPY) * factor
        tl.store(out + column, dz.to(tl.bfloat16), mask=inside)


class InPlaceBackend(CudaBackend):
    """See `projection.Backend`."""

    name = "in_place"

    def chunk_tokens(self, projection: Projection) -> int:
        """Tokens whose whole rows of logits fit."""
        return self._chunk_tokens(projection, 0, 0) if _able(projection) else super().chunk_tokens(projection)

    def chunk_gradients(
        self,
        projection: Projection,
        logits: Tensor,
        stats: Tensor,
        given: TokenGradients,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
    ) -> None:
        """Overwrites `logits` by their gradient and adds to both gradients, one GEMM each."""
        p = projection
        if not _able(p):
            super().chunk_gradients(p, logits, stats, given, grad_hidden, grad_weight)
        elif p.tokens and p.count:
            per_token = GradientMaker(p, given, 0).of_tokens(slice(0, p.tokens))
            dz = gradient_in_place(logits, first=p.first, **per_token)
            with fp32_products(p.hidden.device):
                add_gradients(dz, None, p.hidden, p.weight, grad_hidden, grad_weight)


def _able(p: Projection) -> bool:
    """The gradient is one bf16 number per logit."""
    return p.grad_logits == "bf16" and p.hidden.dtype == torch.bfloat16

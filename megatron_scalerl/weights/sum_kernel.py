"""Computes the weighted sum of `weights.digest` on a GPU, by a Triton kernel that reads every value once.

    sum_r rows[r] * sum_j inner[j] * bits[starts[r] + j]      modulo 2^64

The kernel also runs on CPU tensors in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Number of values that one program of the kernel reads in a step."""
SPAN = 16 * BLOCK
"""Number of values that one program of the kernel sums in all steps."""


def weighted_sum(bits: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, inner: torch.Tensor) -> int:
    """The sum that the module's docstring defines, from 0 to 2^64 - 1.

    bits: [n] of any integer type, as unsigned numbers. starts, rows: [r] int64. inner: [j] int64. All on one device.
    """
    width = len(inner)
    if not len(starts) or not width:
        return 0
    sums = torch.empty(len(starts), triton.cdiv(width, SPAN), dtype=torch.int64, device=bits.device)
    # A load extends the sign of an integer to 64 bits, and the mask removes the extension. A mask of -1 keeps all 64
    # bits.
    mask = -1
    if bits.element_size() < 8:
        mask = (1 << (8 * bits.element_size())) - 1
    _weighted_sum_kernel[sums.shape](bits, starts, rows, inner, sums, width, mask, SPAN=SPAN, BLOCK=BLOCK)
    return int(sums.sum()) & ((1 << 64) - 1)


@triton.jit
def _weighted_sum_kernel(bits, starts, rows, inner, sums, width, mask, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    span = tl.program_id(1)
    start = bits + tl.load(starts + row)
    total = tl.zeros((BLOCK,), tl.int64)
    for offset in range(0, SPAN, BLOCK):
        index = span * SPAN + offset + tl.arange(0, BLOCK)
        inside = index < width
        value = tl.load(start + index, mask=inside, other=0).to(tl.int64) & mask
        total += value * tl.load(inner + index, mask=inside, other=0)
    tl.store(sums + row * tl.num_programs(1) + span, tl.sum(total) * tl.load(rows + row))

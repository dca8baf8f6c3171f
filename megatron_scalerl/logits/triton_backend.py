"""The logit projection on a GPU with a fused forward pass: its logits never reach memory.

For passes that need log-probabilities only, and for workspaces too small for an efficient cuBLAS block. Gradients are
those of `cuda_backend`.
"""

from __future__ import annotations

from torch import Tensor

from megatron_scalerl.logits.cuda_backend import CudaBackend
from megatron_scalerl.logits.fused_kernel import fused_statistics
from megatron_scalerl.logits.merge import no_columns
from megatron_scalerl.logits.projection import Projection


class TritonBackend(CudaBackend):
    """See `projection.Backend`."""

    name = "triton"

    def statistics(self, projection: Projection) -> Tensor:
        """The statistics [4, T], in one kernel."""
        p = projection
        if not p.tokens or not p.count:
            return no_columns(p.tokens, p.hidden, p.accumulator)
        return fused_statistics(p)

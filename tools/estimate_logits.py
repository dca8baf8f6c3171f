"""Seconds of the logit projection on an H100 by arithmetic: an estimate, not a measurement.

    python tools/estimate_logits.py

Needs no GPU. Runs the projection on tensors without memory (device meta), so that chunks and products are those of
the code, and adds up what they take at least: a GEMM its operations at FLOPS, stretched to whole waves of tiles of
TILE over PROCESSORS, or its traffic at BANDWIDTH if that takes longer; everything else its traffic. Launches, waits
and the all-gathers of tensor parallelism are left out. One JSON line for each shape and way:

chunk       tokens of a chunk with whole rows; 0: the logits are computed twice
products    GEMMs that are launched
ms          forward and backward
of_gemms    the three GEMMs that nobody can do without, at FLOPS, over ms
"""

import math
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import harness
from checkout import explained

parser = harness.benchmark(__doc__)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from megatron_scalerl.logits import cuda_backend, row_kernels
    from megatron_scalerl.logits.api import token_logprobs, token_loss

FLOPS = 798e12
"""Rate of bf16 GEMMs of cuBLAS on an H100 SXM (FLOP/s): a round figure that programs reach."""
BANDWIDTH = 3.0e12
"""Rate of its memory (bytes/s), likewise."""
TILE = (128, 256)
PROCESSORS = 132
SHAPES = {
    "tools/bench_logits.py": (16384, 4096, 128256),
    "8B recipe, TP 2": (16384, 4096, 128256 // 2),
    "Scout recipe, TP 4": (16384, 5120, 202048 // 4),
}
"""Tokens, hidden size and the columns of one rank."""
WAYS = [(512, False), (512, True), (2048, True)]
"""Workspace (MiB), and whether the loss is asked for in the chunk."""
PASSES = {"zeros_like", "addcmul_", "mul", "_to_copy", "copy_", "add_"}
"""Operators that read or write memory, beside products and our kernels."""


class Sum(TorchDispatchMode):
    """Seconds and products of a projection that is computed inside."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0
        self.products = 0

    def moved(self, *tensors):
        """Traffic alone."""
        self.seconds += sum(t.numel() * t.itemsize for t in tensors if t is not None) / BANDWIDTH

    def product(self, out, a, b, *, adds):
        rows, columns = out.shape
        tiles = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
        waves = math.ceil(tiles / PROCESSORS) * PROCESSORS / tiles
        moved = sum(t.numel() * t.itemsize for t in (a, b, out, *[out] * adds))
        self.seconds += max(2.0 * rows * columns * a.shape[1] / FLOPS * waves, moved / BANDWIDTH)
        self.products += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in PASSES:
            self.moved(*(t for t in tree_leaves((args, result)) if isinstance(t, Tensor)))
        return result

    @contextmanager
    def counting(self):
        """In place of GEMMs and kernels, which the meta device lacks, their cost."""

        with (
            patch.object(row_kernels, "compiled", lambda: False),
            patch.object(cuda_backend, "set_product", partial(self.product, adds=False)),
            patch.object(cuda_backend, "add_product", partial(self.product, adds=True)),
            patch.object(cuda_backend, "row_statistics", lambda z, *_: self.moved(z)),
            patch.object(cuda_backend, "logit_gradient", lambda z, *_, high, low, **__: self.moved(z, high, low)),
            self,
        ):
            yield


def estimate(tokens, width, columns, room, in_chunk):
    """One line."""
    hidden, head = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (tokens, columns))
    head.requires_grad_().main_grad = torch.empty(columns, width, device="meta")  # type: ignore[attr-defined]
    head.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    options = dict(backend="cuda", workspace_mb=room, trusted=True, main_grad=True)
    chunks = []

    def loss(logprobs, entropies, places):
        chunks.append(len(places))
        return logprobs.sum()

    total = Sum()
    with total.counting():
        if in_chunk:
            result = token_loss(hidden.requires_grad_(), head, targets, loss, **options)[0]
        else:
            result = token_logprobs(hidden.requires_grad_(), head, targets, **options)[0].sum()
        result.backward()
    once = 2.0 * tokens * width * columns / FLOPS
    return {
        "workspace_mb": room,
        "in_chunk": in_chunk,
        "chunk": chunks[0] if type(result.grad_fn).__name__ == "TokenLossBackward" else 0,
        "products": total.products,
        "ms": round(1e3 * total.seconds, 1),
        "of_gemms": round(3 * once / total.seconds, 2),
    }


if __name__ == "__main__":
    for name, shape in SHAPES.items():
        for way in WAYS:
            harness.report(OPTIONS, {"shape": name, **estimate(*shape, *way)})

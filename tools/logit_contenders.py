"""Implementations of token log-probabilities to compare: ours, naive PyTorch, fused functions of other projects.

For tools/bench_logits.py. Peers are imported when they run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_scalerl.logits.api import token_logprobs, token_loss

NAIVE = "naive, fp32 logits"
CCE = "cut_cross_entropy, no filter"
THIRD = 512
"""Workspace on a CPU (MiB): a third of the naive path's extra memory."""
SIXTH = 96
"""Workspace on a CPU (MiB): a sixth of that memory."""
CHUNK = 512
"""Workspace on a CPU with the loss in the chunk (MiB)."""

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(hidden, weight, targets) -> the sum of log-probabilities or of their negatives, and each of them if available."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation of the projection."""

    name: str
    run: Run
    gemms: float = 3
    """GEMMs of 2 T H V operations, forward and backward; one of them forward unless `all_forward`."""
    all_forward: bool = False
    main_grad: bool = False
    """The head's gradient is added to a preallocated fp32 buffer."""
    peer: bool = False
    """Code of another project, which runs in a process of its own."""
    package: str | None = None
    """The package that it requires."""


def _ours(name, backend, room, *, inside=False, grad_logits="bf16"):
    """This project's projection with one backend; `inside`: with the loss in the chunk.

    In two passes the head's gradient is added to an fp32 main_grad, as in the trainer: without one it would be summed
    in fp32 first.
    """

    def in_two_passes(h, w, y):
        logprob, _ = token_logprobs(h, w, y, grad_logits=grad_logits, workspace_mb=room, backend=backend)
        return logprob.sum(), logprob

    def in_the_chunk(h, w, y):
        total, logprob, _ = token_loss(h, w, y, lambda lp, _, at: lp.sum(), workspace_mb=room, backend=backend)
        return total, logprob

    if inside:
        return Contender(name=name, run=in_the_chunk, all_forward=True)
    gemms = 5 if grad_logits == "bf16x2" else 4
    return Contender(name=name, run=in_two_passes, gemms=gemms, main_grad=True)


def _naive_fp32(h, w, y):
    """fp32 products, all log-probabilities kept; logits are freed as soon as autograd allows."""
    logprob = (h.float() @ w.float().t()).log_softmax(-1).gather(1, y[:, None])[:, 0]
    return logprob.sum(), logprob


def _naive_bf16(h, w, y):
    """bf16 logits, cross-entropy of all of them."""
    logprob = -F.cross_entropy(h @ w.t(), y, reduction="none")
    return logprob.sum(), logprob


def _torch_linear(chunked):
    """PyTorch's own fused function: the reference path, or the chunked one (a scalar loss with gradients inside)."""

    def run(h, w, y):
        if chunked:
            chunks = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(h, w, y, reduction="sum", options=chunks), None
        loss = F.linear_cross_entropy(h, w, y, reduction="none")
        return loss.sum(), -loss

    return run


def _liger(h, w, y):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(h, w, y, reduction="sum"), None


def _cut_cross_entropy(h, w, y):
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(h, w, y, reduction="none", impl="cce", filter_eps=None)
    return loss.sum(), -loss


def _quack(h, w, y):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(h, w, y, reduction="sum"), None


def _verl(h, w, y):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(h, w, y, 1.0, "none")[0]
    return loss.sum(), -loss.abs()


def contenders_on(device):
    """The contenders on a device: ours, the naive paths, then peers."""
    naive = [Contender(name=NAIVE, run=_naive_fp32)]
    if device == "cpu":
        mine = [_ours(f"torch, {room} MiB", "torch", room) for room in (THIRD, SIXTH)]
        mine.append(_ours(f"torch, loss in the chunk, {CHUNK} MiB", "torch", CHUNK, inside=True))
        peers = [
            Contender(name="torch linear_cross_entropy", run=_torch_linear(False), peer=True),
            Contender(
                name="torch linear_cross_entropy, chunked", run=_torch_linear(True), all_forward=True, peer=True
            ),
        ]
    else:
        mine = [_ours(name, name, 512) for name in ("cuda", "torch")]
        mine.append(_ours("cuda, bf16x2", "cuda", 512, grad_logits="bf16x2"))
        mine.append(_ours("cuda, loss in the chunk", "cuda", 2048, inside=True))
        naive.append(Contender(name="naive, bf16 logits", run=_naive_bf16))
        peers = [
            Contender(name="Liger", run=_liger, all_forward=True, peer=True, package="liger_kernel"),
            Contender(name=CCE, run=_cut_cross_entropy, gemms=4, peer=True, package="cut_cross_entropy"),
            Contender(name="QuACK", run=_quack, all_forward=True, peer=True, package="quack"),
            Contender(name="verl", run=_verl, gemms=4, peer=True, package="verl"),
        ]
    return [*mine, *naive, *peers]

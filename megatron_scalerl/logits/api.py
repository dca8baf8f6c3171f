"""The one entrance to the logit projection; backends stand behind it.

Numerics contract, of every backend. Products of the operands are exact and summed in fp32 (fp64 for fp64 operands);
logits are never rounded below that before the softmax, and TF32 is off wherever an operand is fp32, whatever the
user has set. The running maximum starts from the row itself, so that rows of any level stay finite; sums are taken
of exp(z - maximum) without the maximum's own 1, so that a probability near 1 keeps its logarithm; the entropy is
centred on the maximum. Ranks exchange four numbers per token in one all-gather and merge them in rank order: every
tensor-parallel rank holds the same bits. Log-probabilities are within 5e-5 nats of fp64 for |logit| <= 50. The
gradient of bf16 logits enters the GEMMs of the backward pass as `grad_logits` says: the head's gradient is then
within 3e-3 (bf16) or 1e-5 (bf16x2, fp32) of exact, relative, before it is rounded to its own type.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.logits.arguments import Settings, checked
from megatron_scalerl.logits.chunk_loss import ChunkLoss, TokenLoss
from megatron_scalerl.logits.function import TokenLogprobs
from megatron_scalerl.logits.projection import Entropy, GradLogits, Precision


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    logits: Precision = "fp32",
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    places: Tensor | None = None,
    trusted: bool = False,
    grad_logits: GradLogits = "bf16",
    sequence_parallel: bool = False,
    main_grad: bool | None = None,
    workspace_mb: float = 512.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy of the distribution, both [T] fp32 (fp64 for fp64 input), nats.

    hidden [T, H], weight [V/p, H] (this rank's rows of the head), both bf16, fp32 or fp64; targets [T] (ids of the
    whole vocabulary). `group` is the tensor-parallel group of size p: targets, masks and options are the same on
    all its ranks, and so are the results, bit for bit. Numerics: see the top of this file.

    logits "fp32": see there (Khatri et al. 2025, arXiv 2510.13786, section 3.2). "model": logits rounded to the
    operands' dtype first, as an engine without an fp32 head gives them. `temperature` divides the logits, one
    number or [T]. entropy "none": zeros; "metric": without gradient; "grad": differentiable. Columns from
    `vocab_size` (the true size, default all) are padding and have probability 0.

    `loss_mask` [T] bool: only its tokens are computed; elsewhere targets may hold anything, and results are 0.
    `places` [C] int64 says the same by their places, each once: a host that knows them need not wait for a GPU that
    counts a mask. `trusted`: the caller has checked targets and temperatures, and that all ranks hold the same; what
    tensors hold is then neither checked nor compared, and nothing is read back from the device.
    `grad_logits`: how the gradient of bf16 logits enters GEMMs, see `Projection.grad_logits`; fp32 and fp64
    operands keep theirs. `sequence_parallel`: hidden is this rank's [T/p, H] share, gathered here, and its gradient
    is reduce-scattered in fp32. `main_grad` True adds the weight's gradient straight to weight.main_grad, as
    Megatron's gradient accumulation fusion does; None does so where Megatron's DDP has made one; False never.
    `workspace_mb` (MiB) bounds what is allocated beside inputs, results and gradients: the backward pass computes
    the logits again. `backend`: torch, one of the others, or auto; see `chosen_backend`.

    Raises ValueError for a target outside the vocabulary, shapes and types that do not fit, a quantised head, a
    workspace too small and a backend that cannot run here: before ranks exchange anything else, on all alike.
    """
    settings = Settings(
        group=group,
        logits=logits,
        temperature=temperature,
        entropy=entropy,
        vocab_size=vocab_size,
        loss_mask=loss_mask,
        places=places,
        trusted=trusted,
        grad_logits=grad_logits,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        workspace_mb=workspace_mb,
        backend=backend,
    )
    return TokenLogprobs.apply(hidden, weight, checked(hidden, weight, targets, settings, in_chunks=False))


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: ChunkLoss,
    *,
    group: dist.ProcessGroup | None = None,
    logits: Precision = "fp32",
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    vocab_size: int | None = None,
    loss_mask: Tensor | None = None,
    places: Tensor | None = None,
    trusted: bool = False,
    grad_logits: GradLogits = "bf16",
    sequence_parallel: bool = False,
    main_grad: bool | None = None,
    workspace_mb: float = 512.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is a sum over tokens, and log-probabilities and entropies [T] as `token_logprobs` gives them.

    Only the loss has a gradient. It is computed here, chunk by chunk, while the logits are there, and scaled in
    the backward pass: three GEMMs instead of four, for a gradient of the head in fp32 that stays until then.
    `loss(logprobs [C], entropies [C], places [C])` gives the loss of some tokens (those of `loss_mask`, each once)
    as a scalar; `places` says which of the T tokens they are. entropy "grad" lets it depend on the entropies, too.
    It fits CISPO and losses with a clipped ratio per token, not GSPO, whose ratio is that of a sequence.

    Other arguments and errors as `token_logprobs`; the workspace has to hold one token's logits and their gradient.
    """
    settings = Settings(
        group=group,
        logits=logits,
        temperature=temperature,
        entropy=entropy,
        vocab_size=vocab_size,
        loss_mask=loss_mask,
        places=places,
        trusted=trusted,
        grad_logits=grad_logits,
        sequence_parallel=sequence_parallel,
        main_grad=main_grad,
        workspace_mb=workspace_mb,
        backend=backend,
    )
    return TokenLoss.apply(hidden, weight, loss, checked(hidden, weight, targets, settings, in_chunks=True))

"""The entry points of the logit projection: `token_logprobs` and `token_loss`.

Numerics contract of every backend:

* Products of the operands are exact and summed in fp32 (fp64 for fp64 operands).
* Logits keep fp32 or more until the softmax. TF32 is off wherever an operand is fp32, whatever the user has set.
* The running maximum starts from the row's first logits, so rows of any level stay finite.
* Sums of exp(z - maximum) leave out the maximum's own 1, so the logarithm of a probability near 1 stays exact. The
  entropy is centered on the maximum.
* Ranks exchange four numbers per token in one all-gather, and merge the numbers in rank order. So every
  tensor-parallel rank holds the same bits.
* On CPUs log-probabilities are within 5e-5 nats of fp64 for |logit| <= 50. The sums of an H200's tensor cores were up
  to 1.9e-4 nats off at hidden sizes of 4,096 and more.
* The gradient of bf16 logits enters the GEMMs of the backward pass as `grad_logits` says. Before the head's gradient
  is rounded to the head's type, its relative error is at most 3e-3 (bf16) or 1e-5 (bf16x2, fp32).
"""

from typing import Any

from torch import Tensor

from megatron_scalerl.logits.arguments import Settings, checked
from megatron_scalerl.logits.chunk_loss import ChunkLoss, TokenLoss
from megatron_scalerl.logits.divergence import SecondPolicy
from megatron_scalerl.logits.function import TokenLogprobs
from megatron_scalerl.types import Float, Int64


def token_logprobs(
    hidden: Float[Tensor, "T H"], weight: Float[Tensor, "rows H"], targets: Int64[Tensor, " T"], **options: Any
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-probability of each target and entropy of each distribution (nats), in fp32, or fp64 for fp64 input.

    `weight` has this rank's rows of the head. hidden and weight are both bf16, fp32 or fp64. targets are ids of the
    whole vocabulary. The options are the fields of `arguments.Settings`. The numerics contract is at the top of this
    file.

    Raises ValueError for a target outside the vocabulary, shapes or types that do not fit, a quantized head, a
    workspace that is too small, and a backend that cannot run here. The error comes before ranks exchange anything.
    """
    call = checked(hidden, weight, targets, Settings(**options))
    return TokenLogprobs.apply(hidden, weight, call)


def token_loss(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "rows H"],
    targets: Int64[Tensor, " T"],
    loss: ChunkLoss,
    *,
    second: SecondPolicy | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """A loss that is a sum over tokens, as a scalar, with the results of `token_logprobs`.

    Only the loss has a gradient. The forward pass computes the gradient chunk by chunk, while the logits are in
    memory, and the backward pass scales it. This takes three GEMMs instead of four. In return an fp32 gradient of the
    head stays in memory between the passes. If the workspace is too small for a chunk of useful size
    (`projection.Backend.chunk_tokens`), the logits are computed twice.

    loss: `loss(logprobs [C], entropies [C], places [C])` returns the summed loss of C tokens of the loss mask as a
    scalar. Each token is passed once. `places` are the tokens' positions among the T tokens. With entropy "grad" the
    loss may depend on the entropies. CISPO and losses that clip a ratio per token have this form. GSPO does not,
    since its ratio belongs to a sequence.

    second: another policy. The loss then includes the weighted sum of the tokens' exact divergences from that policy
    (`logits.divergence`), and the divergences [T] (nats) are a fourth result. A divergence requires the backend
    torch, and divides the workspace among five matrices of a chunk's logits.

    Other arguments and errors are those of `token_logprobs`.
    """
    if second is not None:
        options["backend"] = "torch"
    call = checked(hidden, weight, targets, Settings(**options))
    if second is not None or not call.shape.tokens or call.chunk_tokens(weight):
        results = TokenLoss.apply(hidden, weight, loss, call, second)
        return results if second is not None else results[:3]
    # The loss needs log-probabilities over the whole vocabulary, so ranks first merge the statistics of all columns.
    logprobs, entropies = TokenLogprobs.apply(hidden, weight, call)
    places = call.places(hidden.device)
    value = loss(logprobs[places], entropies[places], places)
    return value, logprobs.detach(), entropies.detach()

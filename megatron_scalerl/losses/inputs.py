"""The input and output of a loss, and the functions that several losses share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_scalerl.record import record
from megatron_scalerl.types import Bool, Float, Int32, Int64

if TYPE_CHECKING:  # the controller imports `losses.reduction` without torch
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on |trainer - rollout log-prob| (nats) before the exponential: e^20 is about 5e8, far beyond every cap and
clip, and e^40 does not overflow in float32."""


@record
class LossInputs:
    """The input of a loss, a micro-batch: N positions of several packed sequences, all tensors [N]."""

    trainer_logprobs: Float[Tensor, " N"]
    """float32 with gradient: log pi_train of the target token (nats)."""
    rollout_logprobs: Float[Tensor, " N"]
    """float32: log-probability under the engine that sampled the token (nats)."""
    advantages: Float[Tensor, " N"]
    """float32: advantage of the token: the completion's value, or a value per token."""
    loss_mask: Bool[Tensor, " N"]
    """True for a sampled token. Elsewhere the other fields may have any value, NaN included."""
    token_weights: Float[Tensor, " N"]
    """float32: weight in the sum, see `reduction.token_weights`."""
    sequence_ids: Int64[Tensor, " N"]
    """int64: number of the position's sequence, from 0; below N, since no sequence is empty."""
    staleness: Int32[Tensor, " N"] | None = None
    """int32: optimizer steps from the version that sampled the token to the version in training."""
    columns: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """float32: the columns of the run's algorithm, by name (`ScaleRL.columns`)."""


@record
class LossOutput:
    """The value of a loss on one micro-batch."""

    loss: Float[Tensor, ""]
    """With gradient: sum over the loss mask of token_weight x token loss."""
    is_weights: Float[Tensor, " N"]
    """Importance weight before capping or clipping, without gradient, 1 off the loss mask."""
    capped: Bool[Tensor, " N"]
    """True where the cap or clip is active."""
    metrics: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """Numbers of the loss's own, each [N] without gradient, reduced over the loss mask as `ScaleRL.metrics` says."""


Function = TypeVar("Function", bound=Callable[..., Any])


def separable(loss: Function) -> Function:
    """Mark a loss that is a sum of independent token losses, which can be computed over any part of the tokens.

    GSPO has no such mark: the ratio belongs to a whole sequence.
    """
    loss.separable = True  # type: ignore[attr-defined]
    return loss


def masked(values: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """`values` with 0 off the loss mask; masked values affect neither the result nor the gradient."""
    # Not a product with the mask, which would keep a NaN and give the NaN a gradient.
    return values.where(loss_mask, values.new_zeros(()))


def log_ratio(inputs: LossInputs) -> Float[Tensor, " N"]:
    """log(pi_train / pi_gen) per token, 0 off the loss mask, clamped to +-MAX_LOG_RATIO.

    A token at the clamp has no gradient through the ratio: such a ratio is a fault in the data, not a signal.
    """
    # Masked before the difference: off the mask the engine's numbers may be NaN.
    trainer = masked(inputs.trainer_logprobs, inputs.loss_mask)
    rollout = masked(inputs.rollout_logprobs, inputs.loss_mask)
    return (trainer - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(token_losses: Float[Tensor, " N"], inputs: LossInputs) -> Float[Tensor, ""]:
    """Sum over the loss mask of token_weight x token loss. The weights contain the denominator."""
    weights = masked(inputs.token_weights, inputs.loss_mask)
    return (weights * token_losses).sum()


def clipped_surrogate(
    ratio: Float[Tensor, " N"], inputs: LossInputs, *, clip_low: float, clip_high: float
) -> LossOutput:
    """The loss -min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A), which DAPO, GRPO and GSPO share.

    Source: Khatri et al. 2025, arXiv 2510.13786, eq. 3 (clip_asym). A token counts as capped if the clipped branch is
    smaller, so that the token has no gradient.
    """
    advantages = masked(inputs.advantages, inputs.loss_mask)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return LossOutput(
        loss=-weighted_sum(unclipped.minimum(clipped), inputs),
        is_weights=ratio.detach(),
        capped=(clipped < unclipped).detach(),
    )

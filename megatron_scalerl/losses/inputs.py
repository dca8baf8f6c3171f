"""The input and output of a loss, and the functions that several losses share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_scalerl.record import record
from megatron_scalerl.types import Bool, Float, Int32, Int64

# for types alone: the controller imports this package and has to start without loading torch
if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on |trainer - rollout log-prob| (nats) before the exponential.

e^20 is about 5e8, far beyond every cap and clip. The square of such a ratio, e^40, does not overflow in float32."""


@record
class LossInputs:
    """The input of a loss: one micro-batch of several packed sequences with N positions. All tensors are [N]."""

    trainer_logprobs: Float[Tensor, " N"]
    """float32 with gradient: log pi_train of the target token (nats)."""
    rollout_logprobs: Float[Tensor, " N"]
    """float32: log-probability under the engine that sampled the token (nats)."""
    advantages: Float[Tensor, " N"]
    """float32: advantage of the token. The tokens of a completion may share one value."""
    loss_mask: Bool[Tensor, " N"]
    """True for a sampled token. Elsewhere the other fields may have any value, NaN included."""
    token_weights: Float[Tensor, " N"]
    """float32: weight of the token's loss in the sum, see `reduction.token_weights`."""
    sequence_ids: Int64[Tensor, " N"]
    """int64: number of the sequence to which the position belongs, counted from 0. No sequence is empty, so all
    numbers are below N."""
    staleness: Int32[Tensor, " N"] | None = None
    """int32: optimizer steps between the policy version that sampled the token and the version in training."""
    columns: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """float32: the columns of the run's algorithm, by name (`ScaleRL.columns`)."""


@record
class LossOutput:
    """The result of a loss on one micro-batch."""

    loss: Float[Tensor, ""]
    """With gradient: sum over the loss mask of token_weight x token loss."""
    is_weights: Float[Tensor, " N"]
    """Importance weight before capping or clipping, without gradient, 1 off the loss mask."""
    capped: Bool[Tensor, " N"]
    """True where the cap or clip is active."""
    metrics: Mapping[str, Float[Tensor, " N"]] = field(default_factory=dict)
    """The loss's own metrics, each [N] without gradient. `ScaleRL.metrics` says how each is reduced over the loss
    mask."""


Function = TypeVar("Function", bound=Callable[..., Any])


def separable(loss: Function) -> Function:
    """Decorator that marks a loss as a sum of independent token losses.

    The trainer may compute a marked loss over any part of the tokens. GSPO is not marked, because one ratio belongs
    to all tokens of a sequence.
    """
    loss.separable = True  # type: ignore[attr-defined]
    return loss


def masked(values: Float[Tensor, " N"], loss_mask: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """`values` on the loss mask, and 0 elsewhere. Values off the mask change neither the result nor the gradient of
    the loss."""
    # A product with the mask would keep a NaN, and give the NaN a gradient.
    return values.where(loss_mask, values.new_zeros(()))


def log_ratio(inputs: LossInputs) -> Float[Tensor, " N"]:
    """log(pi_train / pi_gen) per token, clamped to +-MAX_LOG_RATIO; 0 off the loss mask.

    A token at the clamp has no gradient through the ratio: such a ratio is a fault in the data, not a signal.
    """
    # Both log-probs are masked before the difference, because the engine's log-probs off the mask may be NaN.
    trainer = masked(inputs.trainer_logprobs, inputs.loss_mask)
    rollout = masked(inputs.rollout_logprobs, inputs.loss_mask)
    return (trainer - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(token_losses: Float[Tensor, " N"], inputs: LossInputs) -> Float[Tensor, ""]:
    """Sum over the loss mask of token_weight x token loss. The token weights contain the denominator of the mean."""
    weights = masked(inputs.token_weights, inputs.loss_mask)
    return (weights * token_losses).sum()


def clipped_surrogate(
    ratio: Float[Tensor, " N"], inputs: LossInputs, *, clip_low: float, clip_high: float
) -> LossOutput:
    """The loss -min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A), which DAPO, GRPO and GSPO share.

    A token counts as capped if the minimum is the clipped term; such a token has no gradient. Source: Khatri et al.
    2025, arXiv 2510.13786, eq. 3 (clip_asym).
    """
    advantages = masked(inputs.advantages, inputs.loss_mask)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return LossOutput(
        loss=-weighted_sum(unclipped.minimum(clipped), inputs),
        is_weights=ratio.detach(),
        capped=(clipped < unclipped).detach(),
    )

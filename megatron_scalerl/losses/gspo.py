"""GSPO: one length-normalized ratio for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, clipped_surrogate, log_ratio
from megatron_scalerl.types import Float

if TYPE_CHECKING:
    from torch import Tensor


def sequence_mean_log_ratio(inputs: LossInputs) -> Float[Tensor, " N"]:
    """[N] for each position, the mean of `log_ratios` over the loss-mask tokens of the position's sequence.

    The value is 0 off the loss mask.
    """
    token = log_ratio(inputs)
    # One slot for each position, the most sequences possible: to count the sequences, the host would wait for the
    # device.
    zeros = token.new_zeros(token.shape)
    total = zeros.index_add(0, inputs.sequence_ids, token)
    length = zeros.index_add(0, inputs.sequence_ids, inputs.loss_mask.to(token.dtype))
    mean = (total / length.clamp(min=1.0))[inputs.sequence_ids]
    return mean.where(inputs.loss_mask, mean.new_zeros(()))


def gspo(inputs: LossInputs, *, clip_low: float = 3e-3, clip_high: float = 5e-3) -> LossOutput:
    """The GSPO loss -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) of every token, with the sequence's ratio s.

    s = (pi_train(y) / pi_gen(y))^(1/|y|), where |y| is the number of loss-mask tokens. Every token of a sequence has
    the same s, and the gradient of s flows through all tokens of the sequence. Source: Khatri et al. 2025, arXiv
    2510.13786, section 3.2. That section omits the exponent 1/|y|; the original GSPO has the exponent, and clips of
    1e-3 require it. The defaults of the two clips are the paper's best pair.
    """
    ratio = sequence_mean_log_ratio(inputs).exp()
    return clipped_surrogate(ratio, inputs, clip_low=clip_low, clip_high=clip_high)

"""GRPO: token ratios with a symmetric clip, without a KL term."""

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, clipped_surrogate, log_ratio, separable


@separable
def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """The GRPO loss -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), summed with the token weights.

    rho is the token ratio pi_train / pi_gen. Source: Khatri et al. 2025, arXiv 2510.13786, eq. 2 and 3; clips of 0.2
    on both sides are the GRPO recipe of appendix A.16.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, clip_low=clip_low, clip_high=clip_high)

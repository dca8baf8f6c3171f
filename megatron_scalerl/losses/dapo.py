"""DAPO: token ratios with an asymmetric clip."""

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, clipped_surrogate, log_ratio, separable


@separable
def dapo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.26) -> LossOutput:
    """The DAPO loss -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), summed with the token weights.

    rho is the token ratio pi_train / pi_gen. Source: Khatri et al. 2025, arXiv 2510.13786, eq. 8; the clips 0.2 and
    0.26 are the values of section 3.2 and of the DAPO recipe of appendix A.16.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, clip_low=clip_low, clip_high=clip_high)

"""CISPO: truncated importance-weighted REINFORCE, the loss of ScaleRL."""

from megatron_scalerl.losses.inputs import LossInputs, LossOutput, log_ratio, masked, separable, weighted_sum


@separable
def cispo(inputs: LossInputs, *, max_is_weight: float = 5.0) -> LossOutput:
    """The CISPO loss -sg(min(rho, max_is_weight)) A log pi_train, summed with the token weights.

    rho = pi_train / pi_gen is the token's probability under the trainer over that under the engine; `max_is_weight`
    caps rho. sg is the stop-gradient: the gradient flows through log pi_train alone, also where rho is capped.
    Source: Khatri et al. 2025, arXiv 2510.13786, eq. 4.
    """
    # The ratio is detached: the gradient goes through log pi_train alone, so a capped token still learns.
    ratio = log_ratio(inputs).detach().exp()
    advantages = masked(inputs.advantages, inputs.loss_mask)
    logprobs = masked(inputs.trainer_logprobs, inputs.loss_mask)
    return LossOutput(
        loss=-weighted_sum(ratio.clamp(max=max_is_weight) * advantages * logprobs, inputs),
        is_weights=ratio,
        capped=ratio > max_is_weight,
    )

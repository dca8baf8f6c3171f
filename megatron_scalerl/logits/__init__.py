"""From hidden states to token log-probabilities and entropies: vocabulary-parallel, without rounding the logits."""

from megatron_scalerl.logits.api import token_logprobs, token_loss

__all__ = ["token_logprobs", "token_loss"]

"""From hidden states to token log-probabilities and entropies: vocabulary-parallel, without rounding the logits."""

from megatron_scalerl.logits.api import token_logprobs, token_loss
from megatron_scalerl.logits.choice import chosen_backend

__all__ = ["chosen_backend", "token_logprobs", "token_loss"]

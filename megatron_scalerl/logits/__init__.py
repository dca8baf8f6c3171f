"""The logit projection: token log-probabilities and entropies from hidden states.

The vocabulary is sharded over tensor-parallel ranks. Logits are not rounded."""

from megatron_scalerl.logits.api import token_logprobs, token_loss

__all__ = ["token_logprobs", "token_loss"]

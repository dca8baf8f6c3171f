"""From hidden states to token log-probability and entropy, vocabulary-parallel, without rounding the logits."""

from megatron_scalerl.logits.api import token_logprobs

__all__ = ["token_logprobs"]

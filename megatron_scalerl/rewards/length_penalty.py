"""The length penalty: correct completions that come close to the limit earn less (Khatri et al. 2025, section 3.8).

    R_length(y) = clip((L_max - |y|) / L_cache - 1, -1, 0)      added to the reward of correct completions only

The penalty is 0 up to L_max - L_cache tokens and falls linearly to -1 at L_max. Not specified by the paper and chosen
here: |y| counts the tokens that the policy sampled, end of sequence included, and no forced tokens, as the budget of
a completion and the loss count.
"""

from dataclasses import replace

from megatron_scalerl.recipe.sections import LengthPenaltySection
from megatron_scalerl.types import Score


def length_penalty(tokens: int, section: LengthPenaltySection) -> float:
    """R_length in [-1, 0] of a completion of `tokens` sampled tokens. section: with both limits."""
    assert section.max_tokens is not None and section.cache_tokens is not None
    return min(0.0, max(-1.0, (section.max_tokens - tokens) / section.cache_tokens - 1))


def penalized(score: Score, tokens: int, section: LengthPenaltySection | None) -> Score:
    """The score with the penalty for a correct completion, which stays correct; other scores are unchanged."""
    if section is None or not score.correct:
        return score
    return replace(score, reward=score.reward + length_penalty(tokens, section))

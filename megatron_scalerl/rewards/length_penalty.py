"""The length penalty: correct completions that come close to the limit earn less (Khatri et al. 2025, section 3.8).

    R_length(y) = clip((L_max - |y|) / L_cache - 1, -1, 0)      added to the reward of correct completions only

L_max is rewards.length_penalty.max_tokens, L_cache is cache_tokens. The penalty is 0 up to L_max - L_cache tokens and
falls linearly to -1 at L_max. The paper does not define |y|. Here |y| is the number of tokens that the policy
sampled, with the end of sequence and without forced tokens.
"""

from dataclasses import replace

from megatron_scalerl.recipe.sections import LengthPenaltySection
from megatron_scalerl.types import Score


def length_penalty(tokens: int, section: LengthPenaltySection) -> float:
    """R_length (-1 to 0) of a completion with `tokens` sampled tokens. The caller sets both limits of `section`."""
    assert section.max_tokens is not None and section.cache_tokens is not None
    return min(0.0, max(-1.0, (section.max_tokens - tokens) / section.cache_tokens - 1))


def penalized(score: Score, tokens: int, section: LengthPenaltySection | None) -> Score:
    """The score with the length penalty added to the reward. A correct completion stays correct, even with a negative
    reward; a wrong completion gets no penalty."""
    if section is None or not score.correct:
        return score
    return replace(score, reward=score.reward + length_penalty(tokens, section))

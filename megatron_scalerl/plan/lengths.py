"""Completion lengths: an assumed distribution, or those measured in a run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_scalerl.plan.assumptions import Assumptions
from megatron_scalerl.recipe import Recipe

DRAWN = 20_000


@dataclass(frozen=True)
class Lengths:
    """Completion lengths (tokens), drawn once; the simulation samples from them."""

    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean length."""
        return fmean(self.tokens)

    @property
    def mean_resident(self) -> float:
        """Mean current length of the completions running at one moment: E[L^2] / 2 E[L]."""
        return fmean(n * n for n in self.tokens) / (2 * self.mean)

    def quantile(self, share: float) -> int:
        """The length that `share` of the completions do not exceed."""
        return sorted(self.tokens)[min(len(self.tokens) - 1, int(share * len(self.tokens)))]


def assumed_lengths(recipe: Recipe, assumed: Assumptions) -> Lengths:
    """Log-normal thinking, interrupted as in the recipe, and a log-normal answer within its budget."""
    rng = random.Random(0)
    section = recipe.interruption
    low, high = section.thinking_tokens
    median = math.log(assumed.thinking_median * high)
    answer_median = math.log(max(1.0, assumed.answer_median * section.answer_tokens))
    found = []
    for _ in range(DRAWN):
        thinking = rng.lognormvariate(median, assumed.thinking_sigma)
        answer = min(rng.lognormvariate(answer_median, 0.5), section.answer_tokens)
        if section.enabled:
            found.append(max(1, int(min(thinking, rng.randint(low, high)) + answer)))
        else:
            found.append(max(1, int(min(thinking + answer, recipe.max_completion_tokens))))
    return Lengths(tuple(found))


def seen_lengths(tokens: Sequence[int]) -> Lengths:
    """Measured lengths."""
    assert tokens
    return Lengths(tuple(tokens))

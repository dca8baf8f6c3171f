"""mean@k and pass@k of an evaluation, with intervals over prompts.

Completions of one prompt are correlated: n prompts with k completions each are not n k observations. The prompts are
the clusters of a survey, and each interval is about other prompts of the same kind.

Interval of a rate: Korn and Graubard 1998 (Survey Methodology 24, 193-201), Clopper and Pearson's interval for the
number of independent observations that has the variance between prompts. It holds its level at 30 prompts and at
rates near 0 and 1, where a bootstrap over prompts and Student's t do not.
"""

from collections.abc import Sequence

import numpy as np

from megatron_scalerl.record import record

LEVEL = 0.95
"""Probability of every interval."""
DRAWS = 10_000
"""Bootstrap draws of a paired difference."""
_AT_ONCE = 500
"""Draws whose weights are in memory, 8 bytes for each prompt of each; a divisor of DRAWS."""


@record
class Estimate:
    """A rate with its interval over prompts. Produced by `mean_at_k` and `pass_at_k`."""

    value: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@record
class Counts:
    """How many of the completions of each prompt are correct. Produced by `results.Result.counts`."""

    correct: tuple[int, ...]
    """[P]"""
    completions: tuple[int, ...]
    """[P] at least 1; fewer than k where completions were lost."""

    def rates(self) -> np.ndarray:
        """[P] share of correct completions of each prompt."""
        return np.asarray(self.correct, dtype=float) / np.asarray(self.completions, dtype=float)


def mean_at_k(counts: Counts) -> Estimate:
    """The mean over prompts of the share of correct completions."""
    return rate_over_prompts(counts.rates(), observations=sum(counts.completions))


def pass_at_k(counts: Counts, k: int) -> Estimate:
    """The probability that at least one of k completions is correct, unbiased: the mean over prompts of
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Every prompt has k completions or more.
    """
    values = [
        1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
        for c, n in zip(counts.correct, counts.completions)
    ]
    return rate_over_prompts(np.asarray(values), observations=sum(n // k for n in counts.completions))


def rate_over_prompts(values: np.ndarray, *, observations: int) -> Estimate:
    """The mean of values [P] in [0, 1], one of each prompt, with its interval over prompts (Korn and Graubard).

    observations: bounds the number of independent ones. With equal values of all prompts there are P of them, which
    bounds the share of prompts with another value, and so the rate. With one prompt the interval is [0, 1].
    """
    from scipy import stats

    prompts, value = len(values), float(np.mean(values))
    if prompts < 2:
        return Estimate(value=value, low=0.0, high=1.0, prompts=prompts)
    variance = float(np.var(values, ddof=1)) / prompts
    effective = min(value * (1 - value) / variance, observations) if variance > 1e-15 else float(prompts)
    tail = (1 - LEVEL) / 2
    effective *= float(stats.norm.ppf(tail) / stats.t.ppf(tail, prompts - 1)) ** 2
    correct = value * effective
    wrong = effective - correct
    low = float(stats.beta.ppf(tail, correct, wrong + 1)) if correct > 1e-12 else 0.0
    high = float(stats.beta.ppf(1 - tail, correct + 1, wrong)) if wrong > 1e-12 else 1.0
    return Estimate(value=value, low=min(low, value), high=max(high, value), prompts=prompts)


def bootstrap_means(values: np.ndarray) -> np.ndarray:
    """[DRAWS, C] means of values [P, C] over prompts drawn with replacement, the same prompts for all columns."""
    prompts, random = len(values), np.random.default_rng(0)
    found = []
    for _ in range(DRAWS // _AT_ONCE):
        weights = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=_AT_ONCE) / prompts
        found.append(weights @ values)
    return np.concatenate(found)


def default_ks(completions: Sequence[int]) -> list[int]:
    """The k of pass@k that are shown: powers of two up to the fewest completions of a prompt, and that number."""
    fewest = min(completions)
    return sorted({fewest, *(2**i for i in range(fewest.bit_length()))})

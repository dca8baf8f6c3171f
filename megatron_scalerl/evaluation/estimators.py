"""mean@k and pass@k of an evaluation, with intervals over prompts.

Completions of one prompt are correlated: n prompts with k completions each are not n k observations. The prompts are
the clusters of a survey, and each interval is about other prompts of the same kind.

Interval of a rate: Korn and Graubard 1998 (Survey Methodology 24, 193-201), Clopper and Pearson's interval for the
number of independent observations that has the variance between prompts. This interval keeps the level at 30 prompts
and at rates near 0 and 1, where a bootstrap over prompts and Student's t fail.
"""

from collections.abc import Sequence

import numpy as np

from megatron_scalerl.record import record

Outcomes = Sequence[Sequence[bool]]
"""For each of P prompts, whether each of the prompt's k completions is correct. A prompt has at least one completion,
and fewer than k if some were lost."""
LEVEL = 0.95
"""Confidence level of every interval."""
DRAWS = 10_000
"""Number of bootstrap draws of a paired difference."""
_AT_ONCE = 500
"""Number of draws whose weights are in memory at once, with 8 bytes for each prompt and draw. The number divides
DRAWS."""


@record
class Estimate:
    """A rate with an interval over prompts. Produced by `mean_at_k` and `pass_at_k`."""

    value: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def rates(outcomes: Outcomes) -> np.ndarray:
    """The share of correct completions of each prompt, an array of shape [P]."""
    return np.asarray([sum(row) / len(row) for row in outcomes])


def mean_at_k(outcomes: Outcomes) -> Estimate:
    """The mean over prompts of the share of correct completions."""
    return rate_over_prompts(rates(outcomes), observations=sum(map(len, outcomes)))


def pass_at_k(outcomes: Outcomes, k: int) -> Estimate:
    """The probability that at least one of k completions is correct, unbiased.

    The estimate is the mean over prompts of 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374,
    equation 1). Every prompt has k completions or more.
    """
    values = []
    for row in outcomes:
        # The quotient of binomials is a product of small factors, which does not overflow. With fewer than k wrong
        # completions a factor is 1 - k / k = 0, so that the estimate is 1.
        values.append(1.0 - float(np.prod(1.0 - k / np.arange(len(row) - sum(row) + 1, len(row) + 1))))
    return rate_over_prompts(np.asarray(values), observations=sum(len(row) // k for row in outcomes))


def rate_over_prompts(values: np.ndarray, *, observations: int) -> Estimate:
    """The mean of values [P] in [0, 1], a value a prompt, with an interval over prompts (Korn and Graubard).

    observations: upper bound of the number of independent observations. If all prompts have equal values, this number
    is P, which bounds the share of prompts with another value, and so the rate. With P = 1 the interval is [0, 1].
    """
    from scipy import stats

    prompts = len(values)
    value = float(np.mean(values))
    lower_bound = 0.0
    upper_bound = 1.0
    if prompts > 1:
        variance = float(np.var(values, ddof=1)) / prompts
        independent = float(prompts)
        if variance > 1e-15:
            # The effective sample size: the number of independent completions whose mean has the variance of this
            # mean.
            independent = min(value * (1 - value) / variance, observations)
        tail = (1 - LEVEL) / 2
        # Student's t replaces the normal distribution, since the variance is estimated from the prompts.
        independent *= float(stats.norm.ppf(tail) / stats.t.ppf(tail, prompts - 1)) ** 2
        correct = value * independent
        wrong = independent - correct
        if correct > 1e-12:
            # Clopper and Pearson's bounds are quantiles of Beta, which also takes fractional counts.
            lower_bound = min(float(stats.beta.ppf(tail, correct, wrong + 1)), value)
        if wrong > 1e-12:
            upper_bound = max(float(stats.beta.ppf(1 - tail, correct + 1, wrong)), value)
    return Estimate(value=value, low=lower_bound, high=upper_bound, prompts=prompts)


def bootstrap_means(values: np.ndarray) -> np.ndarray:
    """The means [DRAWS, C] of the columns of `values` [P, C] over P prompts drawn with replacement, for each of DRAWS
    draws. In a draw all columns have the same prompts."""
    prompts = len(values)
    random = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS // _AT_ONCE):
        # The multinomial distribution says how often each of P prompts is drawn with replacement.
        weights = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=_AT_ONCE) / prompts
        means.append(weights @ values)
    return np.concatenate(means)


def default_ks(outcomes: Outcomes) -> list[int]:
    """The k of pass@k that are shown: powers of two up to the fewest completions of a prompt, and this fewest
    number."""
    fewest = min(map(len, outcomes))
    return sorted({fewest, *(2**i for i in range(fewest.bit_length()))})

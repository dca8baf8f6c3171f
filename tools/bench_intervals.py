"""Coverage of 95 % intervals of mean@k over problems: the one of `evaluate`, and two common ones.

    python tools/bench_intervals.py [--draws 1000]

Each draw is an evaluation of problems whose pass rates are Beta-distributed; a method covers if its interval contains
the Beta's mean. Korn and Graubard's interval is `evaluation.estimators.mean_at_k`; the others are the percentile
bootstrap over problems and Student's t of the problems' rates.
"""

from __future__ import annotations

import argparse

import harness
from checkout import explained

CASES = ((30, 16, 0.3, 0.7), (30, 16, 0.1, 1.9), (60, 4, 0.5, 0.5), (500, 4, 2.0, 1.0))
"""(problems, completions of each, both parameters of the Beta distribution)"""
parser = harness.benchmark(__doc__, draws=1000)

if __name__ == "__main__":
    OPTIONS = parser().parse_args()  # before the imports, which take seconds

with explained():
    import numpy as np
    from scipy import stats

    from megatron_scalerl.evaluation.estimators import Counts, bootstrap_means, mean_at_k


def intervals(correct: np.ndarray, k: int, seed: int) -> dict[str, tuple[float, float]]:
    """Method -> its interval. correct: [problems] of k completions."""
    rates = correct / k
    found = mean_at_k(Counts(correct=tuple(map(int, correct)), completions=(k,) * len(correct)))
    low, high = np.quantile(bootstrap_means(rates[:, None], seed=seed, draws=1000), [0.025, 0.975])
    half = stats.t.ppf(0.975, len(rates) - 1) * rates.std(ddof=1) / len(rates) ** 0.5
    return {
        "Korn and Graubard": (found.low, found.high),
        "bootstrap over problems": (float(low), float(high)),
        "Student's t": (rates.mean() - half, rates.mean() + half),
    }


def main(o: argparse.Namespace) -> None:
    """The coverage and the mean width of each method in each case."""
    random, rows = np.random.default_rng(0), []
    for problems, k, a, b in CASES:
        mean, covered, widths = a / (a + b), dict[str, int](), dict[str, float]()
        for draw in range(o.draws):
            correct = random.binomial(k, random.beta(a, b, problems))
            for method, (low, high) in intervals(correct, k, draw).items():
                covered[method] = covered.get(method, 0) + int(low <= mean <= high)
                widths[method] = widths.get(method, 0.0) + (high - low) / o.draws
        for method, count in covered.items():
            case = {"case": f"{problems}, {k}, {mean:.2f}", "method": method}
            harness.report(o, case | {"coverage": count / o.draws, "width": widths[method]}, shown=False)
            rows.append((*case.values(), f"{count / o.draws:.3f}", f"{widths[method]:.3f}"))
    harness.table(("problems, k, mean", "method", "coverage", "mean width"), rows)


if __name__ == "__main__":
    main(OPTIONS)

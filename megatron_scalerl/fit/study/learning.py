"""Learn the prior of the robust fit from any set of published runs (empirical Bayes).

The prior is learned from other runs, never from the one that is forecast: `learn(without=(run,))` uses neither the
points nor the legends of `run`. The shipped `DEFAULT_PRIOR` is `learn()`. Four things are learned, with equal weight
for every run regardless of the number of figures that show it:

* location and spread of B: from the legends;
* location of C_mid relative to the fitted compute: from the legends;
* the weights of the discrepancy hypotheses: by the marginal likelihood of the runs' points;
* the widths and shapes of these distributions (`settings`): by the log predictive density of the points that each of
  the other runs measured after its fitted part, forecast with a prior that was learned without that run as well.

    python -m megatron_scalerl.fit.study.learning
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TypeVar

import numpy as np

from megatron_scalerl.fit.forecast import observe, robust_posterior
from megatron_scalerl.fit.posterior import Posterior, hypothesis_evidence, log_prior
from megatron_scalerl.fit.prior import Discrepancy, Prior
from megatron_scalerl.fit.published import GENERATIONS, PROMPTS, PublishedSeries, published_series
from megatron_scalerl.fit.sigmoid import Array

_OfARun = TypeVar("_OfARun", PublishedSeries, "_Task")

NO_DISCREPANCY_WEIGHT = 0.5
"""Prior probability that a run has no discrepancy: even odds. Not learned: EM on the published runs gives it less
than 1 %, but the intervals have to be calibrated for runs without discrepancy as well. It costs forecast error."""
DEVIATIONS, LENGTHS = (0.006, 0.01, 0.018, 0.03), (0.25, 0.5, 1.0, 2.0)
HYPOTHESES = (Discrepancy(deviation=0.0, length=0.5, weight=1.0),) + tuple(
    Discrepancy(deviation=deviation, length=length, weight=1.0) for deviation, length in product(DEVIATIONS, LENGTHS)
)
"""The hypotheses whose weights are learned."""
NEGLIGIBLE_WEIGHT = 0.02
"""Hypotheses below this weight are dropped: they cost time in every fit."""
REFERENCE = Prior(
    log_exponent_mean=math.log(2.0),
    log_exponent_sd=0.6,
    log_midpoint_mean=math.log(0.5),
    log_midpoint_sd=1.0,
    late_share=0.2,
    discrepancies=HYPOTHESES,
)
"""A wide prior. The settings are scored by importance reweighting of draws from its posterior."""
REFERENCE_DRAWS = 8000
"""Draws per forecast."""
MIN_POINTS = 5
"""Fitted points below which a forecast is not used to score the settings."""
TIE = 0.01
"""Difference in mean log density below which the weaker setting is kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The widths and shapes of the prior around what is learned from other runs."""

    midpoint_sd: float
    """Standard deviation of log(C_mid / largest fitted compute)."""
    exponent_factor: float
    """Multiple of the learned spread of log B."""
    gain_beta: float
    """Second Beta parameter of (A - R_0) / (1 - R_0)."""
    late_share: float
    """Probability of a late midpoint."""


def settings() -> tuple[Setting, ...]:
    """The grid of settings, the weakest first."""
    return tuple(
        Setting(midpoint_sd=sd, exponent_factor=factor, gain_beta=beta, late_share=late)
        for sd, factor, beta, late in product((0.7, 0.5, 0.35), (1.5, 1.0), (1.0, 2.0), (0.25, 0.1))
    )


def learn(without: Iterable[str] = (), grid: tuple[Setting, ...] | None = None) -> Prior:
    """The prior learned from the published runs except `without`. grid: the settings to choose from."""
    left_out = frozenset(without)
    return learned_with(choose(left_out, grid or settings()), left_out)


def choose(without: frozenset[str], grid: tuple[Setting, ...]) -> Setting:
    """The setting that best forecasts the runs except `without`, each with a prior learned from all others."""
    scores = np.array([setting_score(setting, without) for setting in grid])
    return grid[int(np.flatnonzero(scores >= scores.max() - TIE)[0])]


@cache
def setting_score(setting: Setting, without: frozenset[str]) -> float:
    """Mean over runs of the mean log density of their unseen points."""
    scores = []
    for run, tasks in _by_run(_tasks()).items():
        if run not in without:
            prior = learned_with(setting, without | {run})
            scores.append(np.mean([_log_score(task, prior) for task in tasks]))
    return float(np.mean(scores))


def learned_with(setting: Setting, without: frozenset[str]) -> Prior:
    """The prior learned from the runs except `without` with the given setting."""
    exponent = _by_legend(without, lambda series: math.log(series.exponent))
    midpoint = _by_legend(without, lambda series: math.log(series.midpoint / series.compute[series.fitted].max()))
    center = float(np.median(exponent))
    spread = 1.4826 * float(np.median(np.abs(exponent - center)))
    return Prior(
        log_exponent_mean=center,
        log_exponent_sd=setting.exponent_factor * spread,
        log_midpoint_mean=float(np.median(midpoint)),
        log_midpoint_sd=setting.midpoint_sd,
        late_share=setting.late_share,
        gain_beta=setting.gain_beta,
        discrepancies=_discrepancies(without),
    )


def _by_legend(without: frozenset[str], value: Callable[[PublishedSeries], float]) -> Array:
    runs = _by_run(tuple(s for s in published_series() if s.run not in without))
    return np.array([np.mean([value(series) for series in each]) for each in runs.values()])


def _by_run(items: Iterable[_OfARun]) -> dict[str, list[_OfARun]]:
    out: dict[str, list[_OfARun]] = {}
    for item in items:
        out.setdefault(item.run, []).append(item)
    return out


@cache
def _discrepancies(without: frozenset[str]) -> tuple[Discrepancy, ...]:
    """No discrepancy with its fixed weight; the others by maximum marginal likelihood of the runs (EM)."""
    runs = _by_run(tuple(s for s in published_series() if s.run not in without))
    log_evidence = np.array([np.mean([discrepancy_evidence(s.name) for s in each], axis=0) for each in runs.values()])
    evidence = np.exp(log_evidence - log_evidence.max(axis=1, keepdims=True))[:, 1:]
    weights = np.full(evidence.shape[1], 1.0 / evidence.shape[1])
    for _ in range(300):
        responsibilities = evidence * weights
        responsibilities /= responsibilities.sum(axis=1, keepdims=True)
        weights = responsibilities.sum(axis=0) + weights.size**-1.0  # a uniform prior worth one run
        weights /= weights.sum()
    weights = np.where(weights >= NEGLIGIBLE_WEIGHT, weights, 0.0)
    weights *= (1.0 - NO_DISCREPANCY_WEIGHT) / weights.sum()
    kept = [replace(h, weight=float(weight)) for h, weight in zip(HYPOTHESES[1:], weights) if weight > 0.0]
    return (replace(HYPOTHESES[0], weight=NO_DISCREPANCY_WEIGHT), *kept)


@cache
def discrepancy_evidence(name: str) -> Array:
    """[hypotheses] log marginal likelihood of all points of one series under each of `HYPOTHESES`."""
    (series,) = (s for s in published_series() if s.name == name)
    obs = observe(
        series.compute, series.pass_rate, series.initial, prompts=PROMPTS, generations=GENERATIONS, prior=REFERENCE
    )
    return hypothesis_evidence(obs, prior=REFERENCE)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    """A forecast that settings are scored on."""

    run: str
    """The physical run."""
    series: PublishedSeries
    """The series."""
    fitted: np.ndarray
    """[n] True for the points to fit."""
    unseen: np.ndarray
    """[n] True for the points to forecast."""


@cache
def _tasks() -> tuple[_Task, ...]:
    """The authors' forecasts, and a forecast of every series' fitted part from its first half."""
    out = []
    for s in published_series():
        half = s.compute <= 0.5 * s.compute[s.fitted].max()
        for fitted, unseen in ((s.fitted, ~s.fitted), (half, s.fitted & ~half)):
            if unseen.any() and np.count_nonzero(fitted) >= MIN_POINTS:
                out.append(_Task(run=s.run, series=s, fitted=fitted, unseen=unseen))
    return tuple(out)


def _log_score(task: _Task, prior: Prior) -> float:
    """Mean log density of the unseen points, from the reference draws reweighted to `prior`."""
    reference, density = _reference(task)
    weights = log_prior(reference, prior) - log_prior(reference, REFERENCE)
    weights = np.exp(weights - weights.max())
    return float(np.mean(np.log(weights @ density / weights.sum())))


@cache
def _reference(task: _Task) -> tuple[Posterior, Array]:
    """(draws from the posterior under REFERENCE, [draws, unseen] density of each unseen point given the draw)."""
    s = task.series
    obs = observe(
        s.compute[task.fitted],
        s.pass_rate[task.fitted],
        s.initial,
        prompts=PROMPTS,
        generations=GENERATIONS,
        prior=REFERENCE,
    )
    posterior = robust_posterior(obs, REFERENCE, fixed_asymptote=None, draws=REFERENCE_DRAWS, seed=0)
    mean, variance = posterior.true_pass_rate(s.compute[task.unseen])
    variance = variance + posterior.noise_variance[:, None]
    density = np.exp(-0.5 * (s.pass_rate[task.unseen] - mean) ** 2 / variance) / np.sqrt(2.0 * np.pi * variance)
    return posterior, density


def main() -> None:
    """Print the score of every setting on all runs, and the learned prior."""
    for setting in settings():
        print(f"{setting_score(setting, frozenset()):.4f}  {setting}")
    print(learn())


if __name__ == "__main__":
    main()

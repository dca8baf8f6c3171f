"""Learning the prior from runs: what is learned, and that a left-out run contributes nothing."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_scalerl.fit.forecast import fit, observe
from megatron_scalerl.fit.posterior import hypothesis_evidence, log_prior
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, Discrepancy
from megatron_scalerl.fit.published import published_series
from megatron_scalerl.fit.study import learning

FEW = ("MiniMax", "LOO-length-penalty", "GSPO", "token-avg")
TWO = (
    learning.Setting(midpoint_sd=0.7, exponent_factor=1.5, gain_beta=1.0, late_share=0.25),
    learning.Setting(midpoint_sd=0.35, exponent_factor=1.0, gain_beta=2.0, late_share=0.1),
)


CACHED = ("setting_score", "_discrepancies", "discrepancy_evidence", "_tasks", "_reference")


@pytest.fixture
def few_draws(monkeypatch):
    """Learn with few draws, and with empty caches of its own: the shared ones keep what all draws gave."""

    def empty():
        for name in CACHED:
            monkeypatch.setattr(learning, name, cache(getattr(learning, name).__wrapped__))

    monkeypatch.setattr(learning, "REFERENCE_DRAWS", 1000)
    empty()
    return empty


@pytest.fixture
def learned_from(few_draws, monkeypatch):
    """Learn from the given series, with few draws."""

    def learn_from(series, without):
        few_draws()
        monkeypatch.setattr(learning, "published_series", lambda: series)
        prior = learning.learn(without, TWO)
        return prior, [learning.setting_score(s, frozenset(without)) for s in TWO]

    return learn_from


@pytest.mark.slow
def test_points_and_legend_of_a_left_out_run_do_not_reach_its_prior(learned_from):
    few = [s for s in published_series() if s.run in FEW]
    altered = [
        replace(s, exponent=9.0, midpoint=9.0 * s.midpoint, pass_rate=s.pass_rate[::-1].copy())
        if s.run == "MiniMax"
        else s
        for s in few
    ]
    expected = learned_from(few, ("MiniMax",))
    assert learned_from(altered, ("MiniMax",)) == expected
    assert learned_from([s for s in few if s.run != "MiniMax"], ()) == expected
    assert learned_from(altered, ()) != learned_from(few, ())


def test_a_run_in_two_figures_counts_once(learned_from):
    few = [s for s in published_series() if s.run in FEW]
    twice = [*few, replace(few[0], figure="again")]
    once, doubled = (learned_from(series, ())[0] for series in (few, twice))
    assert doubled.log_exponent_mean == once.log_exponent_mean
    assert [d.weight for d in doubled.discrepancies] == pytest.approx([d.weight for d in once.discrepancies])


def test_location_and_spread_of_the_exponent_by_hand(few_draws):
    prior = learning.learned_with(TWO[0], frozenset())
    by_run: dict[str, list[float]] = {}
    for s in published_series():
        by_run.setdefault(s.run, []).append(math.log(s.exponent))
    values = sorted(np.mean(v) for v in by_run.values())
    assert len(values) == 26
    center = (values[12] + values[13]) / 2
    deviations = sorted(abs(v - center) for v in values)
    assert prior.log_exponent_mean == pytest.approx(center)
    assert prior.log_exponent_sd == pytest.approx(1.5 * 1.4826 * (deviations[12] + deviations[13]) / 2)
    assert sum(d.weight for d in prior.discrepancies) == pytest.approx(1.0)
    assert prior.discrepancies[0] == Discrepancy(deviation=0.0, length=0.5, weight=0.5)


def test_discrepancy_is_a_property_of_the_run_not_of_the_validation_set():
    compute, level = np.linspace(0.1, 1.0, 10), np.full(10, 0.5)
    discrepancy = Discrepancy(deviation=0.02, length=1.0, weight=1.0)
    for size, expected in ((1000, 0.02**2 / (0.5 / 16000)), (50, 0.02**2 / (0.5 / 800))):
        obs = observe(compute, level, 0.4, prompts=size, generations=16, prior=DEFAULT_PRIOR)
        assert obs.ratio(discrepancy) == pytest.approx(expected)


def test_evidence_distinguishes_a_run_with_discrepancy_from_one_without():
    compute = np.linspace(0.02, 1.0, 50)
    rng = np.random.default_rng(0)
    straight = 0.4 + 0.2 / (1.0 + (0.3 / compute) ** 2) + rng.normal(0.0, 0.0028, 50)
    waving = straight + 0.01 * np.sin(4.0 * np.log(compute))
    hypotheses = (learning.HYPOTHESES[0], Discrepancy(deviation=0.02, length=1.0, weight=3.0))
    prior = replace(DEFAULT_PRIOR, discrepancies=hypotheses)
    gains = []
    for measured in (straight, waving):
        obs = observe(compute, measured, 0.4, prompts=1000, generations=16, prior=prior)
        none, some = hypothesis_evidence(obs, prior=prior)
        gains.append(some - none)
    assert gains[0] < -3.0 and gains[1] > 10.0


def test_reweighted_draws_are_draws_from_the_other_prior():
    run = next(s for s in published_series() if s.run == "MiniMax")
    known = {"initial": run.initial, "prompts": 1000, "generations": 16, "draws": 8000}
    points = run.compute[run.fitted], run.pass_rate[run.fitted]
    wide = replace(DEFAULT_PRIOR, log_exponent_sd=0.6, log_midpoint_sd=1.0, gain_beta=1.0)
    broad, direct = (fit(*points, prior=prior, **known).posterior for prior in (wide, DEFAULT_PRIOR))
    weights = np.exp(log_prior(broad, DEFAULT_PRIOR) - log_prior(broad, wide))
    mean = (weights @ broad.asymptote) / weights.sum()
    assert mean == pytest.approx(direct.asymptote.mean(), abs=0.004)
    assert abs(broad.asymptote.mean() - direct.asymptote.mean()) > 0.008
    without = replace(DEFAULT_PRIOR, discrepancies=DEFAULT_PRIOR.discrepancies[:1])
    assert np.array_equal(np.isfinite(log_prior(broad, without)), broad.hypothesis == 0)


@pytest.mark.slow
def test_the_shipped_prior_is_learned_from_all_runs():
    learned = learning.learn()
    for key in ("log_exponent_mean", "log_exponent_sd", "log_midpoint_mean"):
        assert getattr(DEFAULT_PRIOR, key) == pytest.approx(getattr(learned, key), abs=1e-3)
    for key in ("log_midpoint_sd", "late_share", "gain_alpha", "gain_beta"):
        assert getattr(DEFAULT_PRIOR, key) == getattr(learned, key)
    shipped, found = DEFAULT_PRIOR.discrepancies, learned.discrepancies
    assert [(d.deviation, d.length) for d in shipped] == [(d.deviation, d.length) for d in found]
    assert [d.weight for d in shipped] == pytest.approx([d.weight for d in found], abs=2e-3)

"""Learning the prior from runs: what is learned, and that a left-out run contributes nothing."""

from dataclasses import replace
from functools import cache

import learning
import numpy as np
import pytest
from known_runs import TINY, by_run, known_runs
from learning import log_prior
from published import published_series
from recipe_runs import curve_of

from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.observations import observe
from megatron_scalerl.fit.posterior import sample
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, Discrepancy

FEW = ("MiniMax", "LOO-length-penalty", "GSPO", "token-avg", "chain_lr1e-4", "chain_lr2e-6")


def altered(known):
    """The run with its points reversed."""
    return replace(known, curve=replace(known.curve, pass_rate=known.curve.pass_rate[::-1].copy()))


@pytest.fixture
def learned_from(monkeypatch):
    """Learn from the given runs, with few draws and hypotheses, and with caches of its own."""
    monkeypatch.setattr(learning, "DRAWS", 300)

    def learn_from(runs, without=()):
        monkeypatch.setattr(learning, "_shape", cache(learning._shape.__wrapped__))
        monkeypatch.setattr(learning, "known_runs", lambda: tuple(runs))
        return learning.learn(without)

    return learn_from


@pytest.mark.full
def test_nothing_of_a_left_out_run_reaches_its_prior(learned_from):
    few = [known for known in known_runs() if known.run in FEW]
    for run in ("MiniMax", "chain_lr1e-4"):
        other = [altered(known) if known.run == run else known for known in few]
        expected = learned_from([known for known in few if known.run != run])
        assert learned_from(few, (run,)) == learned_from(other, (run,)) == expected
        assert learned_from(other) != learned_from(few)


def test_known_runs_of_the_default_are_not_the_held_back_ones():
    learned, held_back = ({k.run for k in known_runs(held_back=held)} for held in (False, True))
    assert len(by_run(known_runs())) == 26 + 18 and len(held_back) == 9 and not learned & held_back
    assert {known.world for known in known_runs(held_back=True)} == {TINY}


def test_discrepancy_is_a_property_of_the_run_not_of_the_validation_set():
    """By hand: over a factor of e a walk of 0.02 gains 0.02^2 p (1 - p), a turn of 0.1 at half 0.1^2 log(2)^2."""
    discrepancy = Discrepancy(weight=1.0, walk=0.02, turn=0.1, turn_from=0.5, level=0.3)
    expected = 0.25 * (0.3**2 + 0.02**2 + 0.1**2 * np.log(2.0) ** 2)
    for size in (1000, 50):
        obs = observe(curve_of(np.exp([-1.0, -0.5, 0.0]), np.full(3, 0.5), prompts=size), DEFAULT_PRIOR)
        deviation = obs.deviation(obs.log_compute, obs.log_compute, discrepancy) * obs.noise_variance
        assert deviation[-1, -1] == pytest.approx(expected) and deviation[0, -1] == pytest.approx(0.25 * 0.3**2)


def test_evidence_distinguishes_a_run_with_discrepancy_from_one_without():
    compute = np.linspace(0.02, 1.0, 50)
    rng = np.random.default_rng(0)
    straight = 0.4 + 0.2 / (1.0 + (0.3 / compute) ** 2) + rng.normal(0.0, 0.0028, 50)
    waving = straight + 0.01 * np.sin(4.0 * np.log(compute))
    hypotheses = (Discrepancy(weight=1.0), Discrepancy(weight=1.0, walk=0.03))
    prior = replace(DEFAULT_PRIOR, discrepancies=hypotheses)
    shares = []
    for measured in (straight, waving):
        posterior = sample(observe(curve_of(compute, measured, prompts=1000), prior), prior=prior)
        shares.append(np.mean(posterior.hypothesis == 1))
    assert shares[0] < 0.05 and shares[1] > 0.999


def test_reweighted_draws_are_draws_from_the_other_prior():
    run = next(s for s in published_series() if s.run == "MiniMax")
    known = {"initial": run.initial, "prompts": 1000, "generations": 16, "draws": 8000}
    points = run.compute[run.fitted], run.pass_rate[run.fitted]
    wide = replace(learning.REFERENCE, discrepancies=DEFAULT_PRIOR.discrepancies)
    broad, direct = (fit(*points, prior=prior, **known).posterior for prior in (wide, DEFAULT_PRIOR))
    weights = np.exp(log_prior(broad, DEFAULT_PRIOR) - log_prior(broad, wide))
    mean = (weights @ broad.asymptote) / weights.sum()
    assert mean == pytest.approx(direct.asymptote.mean(), abs=0.006)
    assert abs(broad.asymptote.mean() - direct.asymptote.mean()) > 0.012
    without = replace(DEFAULT_PRIOR, discrepancies=DEFAULT_PRIOR.discrepancies[:1])
    assert np.array_equal(np.isfinite(log_prior(broad, without)), broad.hypothesis == 0)


@pytest.mark.slow
def test_the_shipped_prior_is_learned_from_all_runs():
    learned = learning.learn()
    for shipped, found in zip(DEFAULT_PRIOR.kinds, learned.kinds, strict=True):
        for key in found.__annotations__:
            assert getattr(shipped, key) == pytest.approx(getattr(found, key), abs=2e-3), (shipped, key)
    assert replace(DEFAULT_PRIOR, kinds=()) == replace(learned, kinds=())

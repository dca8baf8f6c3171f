"""Learning the prior from runs: what is learned, and that a left-out run contributes nothing."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import learning
import numpy as np
import pytest
from known_runs import PUBLISHED, TINY, KnownRun, by_run, known_runs, tasks

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.forecast import fit
from megatron_scalerl.fit.observations import observe
from megatron_scalerl.fit.posterior import hypothesis_evidence, log_prior
from megatron_scalerl.fit.prior import DEFAULT_PRIOR, Discrepancy
from megatron_scalerl.fit.published import published_series

FEW = ("MiniMax", "LOO-length-penalty", "GSPO", "token-avg", "chain_lr1e-4", "chain_lr2e-6")


def altered(known):
    """The run with its points reversed."""
    return replace(known, curve=replace(known.curve, pass_rate=known.curve.pass_rate[::-1].copy()))


@pytest.fixture
def learned_from(monkeypatch):
    """Learn from the given runs, with few draws and hypotheses, and with caches of its own."""
    monkeypatch.setattr(learning, "DRAWS", 300)

    def learn_from(runs, without=()):
        for name in ("_shape", "discrepancy_evidence"):
            monkeypatch.setattr(learning, name, cache(getattr(learning, name).__wrapped__))
        monkeypatch.setattr(learning, "known_runs", lambda: tuple(runs))
        return learning.learn(without)

    return learn_from


@pytest.mark.slow
def test_nothing_of_a_left_out_run_reaches_its_prior(learned_from):
    few = [known for known in known_runs() if known.run in FEW]
    for run in ("MiniMax", "chain_lr1e-4"):
        other = [altered(known) if known.run == run else known for known in few]
        expected = learned_from([known for known in few if known.run != run])
        assert learned_from(few, (run,)) == learned_from(other, (run,)) == expected
        assert learned_from(other) != learned_from(few)


@pytest.mark.slow
def test_a_run_in_two_figures_counts_once(learned_from):
    few = [known for known in known_runs() if known.run in FEW]
    once, twice = learned_from(few), learned_from([*few, few[0]])
    for a, b in zip(once.kinds, twice.kinds):
        assert b.weight == a.weight
        assert b.log_exponent_mean == pytest.approx(a.log_exponent_mean, abs=0.05)
    assert [d.weight for d in twice.discrepancies] == pytest.approx([d.weight for d in once.discrepancies])


@pytest.mark.slow
def test_both_worlds_weigh_the_same_and_the_kinds_are_those_of_their_runs(learned_from):
    kinds = {k.name: k.weight for k in learned_from([known for known in known_runs() if known.run in FEW]).kinds}
    share = {learning.CEILING: 0.5, learning.SOLVED: 0.25, learning.NO_GAIN: 0.25, learning.ANYTHING: 0.0}
    assert kinds == pytest.approx({name: (each + 0.05) / 1.2 for name, each in share.items()})


def test_known_runs_of_the_default_are_not_the_held_back_ones():
    learned, held_back = ({k.run for k in known_runs(held_back=held)} for held in (False, True))
    assert len(by_run(known_runs())) == 26 + 18 and len(held_back) == 9 and not learned & held_back
    assert {known.world for known in known_runs(held_back=True)} == {TINY}


def test_parts_of_a_run():
    run = next(known for known in known_runs() if known.run == "MiniMax")
    c, own = run.curve.compute, run.own
    [authors], [half] = tasks([run], "authors"), tasks([run], "half")
    assert run.world == PUBLISHED and np.array_equal(authors.fitted, own) and np.array_equal(authors.unseen, ~own)
    assert np.array_equal(half.fitted, own & (c <= c[own].max() / 2)) and not (half.unseen & ~own).any()
    short = KnownRun(
        world=TINY, run="x", setting="", curve=run.curve.part(np.arange(4)), own=np.ones(4, dtype=bool), halved=c[1]
    )
    assert tasks([short], "half") == []


def curve_of(compute, pass_rate, *, prompts, initial=0.4):
    generations = np.full(len(compute), 16.0)
    points = {"compute": compute, "pass_rate": pass_rate, "prompts": prompts, "generations": generations}
    return Curve(name="run", source=Path("run"), initial=initial, **points)


def test_discrepancy_is_a_property_of_the_run_not_of_the_validation_set():
    compute, level = np.linspace(0.1, 1.0, 10), np.full(10, 0.5)
    discrepancy = Discrepancy(deviation=0.02, length=1.0, weight=1.0)
    for size, expected in ((1000, 0.02**2 / (0.5 / 16000)), (50, 0.02**2 / (0.5 / 800))):
        obs = observe(curve_of(compute, level, prompts=size), DEFAULT_PRIOR)
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
        obs = observe(curve_of(compute, measured, prompts=1000), prior)
        none, some = hypothesis_evidence(obs, prior=prior)
        gains.append(some - none)
    assert gains[0] < -3.0 and gains[1] > 10.0


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


def test_em_finds_the_distribution_of_runs_whose_own_fits_are_vague():
    rng = np.random.default_rng(1)
    shapes = []
    for center in rng.normal(0.9, 0.3, 40):  # log B of the runs; each is known to 0.5
        draws = rng.normal(center + 0.5 * rng.standard_normal(), 0.5, 2000)
        flat = np.zeros(2000)
        shapes.append(
            learning.Shape(
                gain=np.full(2000, 0.3),
                rise=flat + 0.2,
                log_exponent=draws,
                log_midpoint=flat - 1.0,
                log_reference=flat,
            )
        )
    kind = learning._kind(learning.CEILING, shapes, np.full(40, 0.025))
    assert kind.log_exponent_mean == pytest.approx(0.9, abs=0.15)
    assert kind.log_exponent_sd == pytest.approx(0.3, abs=0.12)
    assert (kind.log_midpoint_mean, kind.log_midpoint_sd) == (pytest.approx(-1.0), 0.5)
    assert kind.gain_alpha / (kind.gain_alpha + kind.gain_beta) == pytest.approx(0.3)


def test_centers_of_a_kind_follow_the_weights_of_its_runs():
    flat = np.zeros(50)
    low, high = (
        learning.Shape(gain=flat + g, rise=flat, log_exponent=flat + g, log_midpoint=flat - g, log_reference=flat)
        for g in (0.2, 0.4)
    )
    kind = learning._kind(learning.CEILING, [low, high], np.array([0.3, 0.1]))
    assert (kind.log_exponent_mean, kind.log_midpoint_mean) == (pytest.approx(0.25), pytest.approx(-0.25))
    assert kind.gain_alpha / (kind.gain_alpha + kind.gain_beta) == pytest.approx(0.25)


@pytest.mark.slow
def test_a_curve_of_one_world_is_read_as_the_other():
    """The same points give the same kind, whatever world they are said to be of."""
    run = next(known for known in known_runs() if known.run == "chain_lr1e-4")
    moved = replace(run, world=PUBLISHED)
    assert learning._shape((moved,)).kind == learning._shape((run,)).kind == learning.SOLVED


@pytest.mark.slow
def test_the_shipped_prior_is_learned_from_all_runs():
    learned = learning.learn()
    assert [k.name for k in DEFAULT_PRIOR.kinds] == [k.name for k in learned.kinds]
    for shipped, found in zip(DEFAULT_PRIOR.kinds, learned.kinds):
        for key in learned.kinds[0].__annotations__.keys() - {"name"}:
            assert getattr(shipped, key) == pytest.approx(getattr(found, key), abs=2e-3), (shipped.name, key)
    assert [(d.deviation, d.length) for d in DEFAULT_PRIOR.discrepancies] == [
        (d.deviation, d.length) for d in learned.discrepancies
    ]
    weights = [[d.weight for d in prior.discrepancies] for prior in (DEFAULT_PRIOR, learned)]
    assert weights[0] == pytest.approx(weights[1], abs=2e-3)
    assert replace(DEFAULT_PRIOR, kinds=(), discrepancies=()) == replace(learned, kinds=(), discrepancies=())

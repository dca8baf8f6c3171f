"""Forecast error and coverage on the published curves, leaving out by physical run."""

import math

import numpy as np
import pytest

from megatron_scalerl.fit import benchmark
from megatron_scalerl.fit.benchmark import COLLAPSING, Outcome, by_fit, leave_one_run_out, summarise
from megatron_scalerl.fit.prior import DEFAULT_PRIOR
from megatron_scalerl.fit.published import published_series


@pytest.fixture(scope="module")
def outcomes():
    series = benchmark.forecastable()
    methods = {"paper": by_fit("paper"), "robust": by_fit(), "left out": leave_one_run_out()}
    return {name: [method(s) for s in series] for name, method in methods.items()}


def test_the_default_prior_is_the_learned_one():
    learned = benchmark.learned_prior()
    assert learned.log_exponent_mean == pytest.approx(DEFAULT_PRIOR.log_exponent_mean, abs=1e-3)
    assert learned.log_exponent_sd == pytest.approx(DEFAULT_PRIOR.log_exponent_sd, abs=1e-3)


def test_a_left_out_run_does_not_inform_its_prior(monkeypatch):
    before = benchmark.learned_prior("ScaleRL-8B-bs768")
    from dataclasses import replace

    changed = [
        replace(s, exponent=9.0) if s.run == "ScaleRL-8B-bs768" else s for s in published_series()
    ]
    monkeypatch.setattr(benchmark, "published_series", lambda: changed)
    assert benchmark.learned_prior("ScaleRL-8B-bs768") == before
    assert benchmark.learned_prior("MiniMax") != benchmark.learned_prior("ScaleRL-8B-bs768")


@pytest.mark.parametrize("method", ["robust", "left out"])
@pytest.mark.parametrize("without", [(), (COLLAPSING,)])
def test_a_fifth_less_error_than_the_papers_procedure(outcomes, method, without):
    paper, ours = (
        summarise([o for o in outcomes[name] if o.run not in without]) for name in ("paper", method)
    )
    assert ours.points == paper.points == (82 if without else 85)
    assert ours.error <= 0.8 * paper.error
    assert ours.by_run < paper.by_run


@pytest.mark.parametrize("method", ["robust", "left out"])
def test_intervals_cover_what_they_say(outcomes, method):
    assert 0.85 <= summarise(outcomes[method]).coverage <= 0.97
    assert 0.85 <= summarise([o for o in outcomes[method] if o.run != COLLAPSING]).coverage <= 0.97
    for run in {o.run for o in outcomes[method]} - {COLLAPSING}:
        assert summarise([o for o in outcomes[method] if o.run == run]).coverage >= 0.80


def test_summary_by_hand():
    first = Outcome(run="a", series="x", errors=np.array([0.1, -0.3]), covered=np.array([1.0, 0.0]), half_width=0.2)
    second = Outcome(run="b", series="y", errors=np.array([0.1]), covered=np.array([1.0]), half_width=0.4)
    pooled = summarise([first, second])
    assert (pooled.points, pooled.error, pooled.by_run) == (3, pytest.approx(0.5 / 3), pytest.approx(0.15))
    assert (pooled.coverage, pooled.half_width) == (pytest.approx(2 / 3), pytest.approx(0.3))


def test_identity_table_names_every_series_once_and_equal_series_agree():
    series = published_series()
    assert len(series) == len({s.name for s in series}) == 36
    assert len({s.run for s in series}) == 26
    for a in series:
        for b in series:
            if a.run == b.run and a.name < b.name:
                gaps = [
                    abs(y - b.pass_rate[int(np.argmin(np.abs(b.compute - c)))])
                    for c, y in zip(a.compute, a.pass_rate)
                    if np.abs(b.compute - c).min() < 0.004 * c
                ]
                assert len(gaps) >= 9 and float(np.median(gaps)) <= 0.0003


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "generations", "seed"), [(1000, 16, 7), (200, 4, 8)])
def test_nominal_coverage_over_synthetic_runs(prompts, generations, seed):
    """200 draws: parameters and new measurements inside their 90 % intervals at that rate."""
    from megatron_scalerl.fit.forecast import fit
    from megatron_scalerl.fit.sigmoid import sigmoid

    rng, size, hits = np.random.default_rng(seed), prompts * generations, []
    for index in range(200):
        n = int(rng.integers(10, 31))
        truth = {
            "asymptote": rng.uniform(0.55, 0.9),
            "exponent": math.exp(rng.normal(math.log(1.9), 0.3)),
            "midpoint": rng.uniform(0.2, 0.7),
        }
        compute = np.concatenate([np.linspace(1 / n, 1.0, n), [1.5, 2.0, 4.0]])
        measured = rng.binomial(size, sigmoid(compute, initial=0.4, **truth)) / size
        result = fit(
            compute[:n], measured[:n], initial=0.4, prompts=prompts, generations=generations, draws=1500, seed=index
        )
        inside = [result.intervals[key][0] <= value <= result.intervals[key][1] for key, value in truth.items()]
        forecast = zip(result.predict(compute[n:]), measured[n:])
        hits.append(inside + [p.lo <= y <= p.hi for p, y in forecast])
    rates = np.mean(hits, axis=0)
    assert np.all(rates >= 0.84) and np.all(rates <= 0.985), rates
    assert 0.86 <= rates[3:].mean() <= 0.97
    assert 0.86 <= rates[:3].mean() <= 0.98

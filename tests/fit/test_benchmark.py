"""Forecast error and coverage on the published curves, leaving out by physical run."""

from functools import cache

import numpy as np
import pytest

from megatron_scalerl.fit.published import published_series
from megatron_scalerl.fit.study import benchmark
from megatron_scalerl.fit.study.benchmark import COLLAPSING, Outcome, by_fit, leave_one_run_out, summarize

METHODS = ["robust", pytest.param("left out", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def outcomes():
    methods = {"paper": by_fit("paper"), "robust": by_fit(), "left out": leave_one_run_out()}
    return cache(lambda name: [methods[name](s) for s in benchmark.forecastable()])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("without", [(), (COLLAPSING,)])
def test_error_is_20_percent_below_the_papers_procedure(outcomes, method, without):
    paper, ours = (summarize([o for o in outcomes(name) if o.run not in without]) for name in ("paper", method))
    assert ours.points == paper.points == (82 if without else 85)
    assert ours.error <= 0.8 * paper.error
    assert ours.by_run < paper.by_run


@pytest.mark.parametrize("method", METHODS)
def test_intervals_have_nominal_coverage(outcomes, method):
    assert 0.85 <= summarize(outcomes(method)).coverage <= 0.97
    assert 0.85 <= summarize([o for o in outcomes(method) if o.run != COLLAPSING]).coverage <= 0.97
    for run in {o.run for o in outcomes(method)} - {COLLAPSING}:
        assert summarize([o for o in outcomes(method) if o.run == run]).coverage >= 0.75


def test_summary_by_hand():
    first = Outcome(run="a", series="x", errors=np.array([0.1, -0.3]), covered=np.array([1.0, 0.0]), half_width=0.2)
    second = Outcome(run="b", series="y", errors=np.array([0.1]), covered=np.array([1.0]), half_width=0.4)
    pooled = summarize([first, second])
    assert (pooled.points, pooled.error, pooled.by_run) == (3, pytest.approx(0.5 / 3), pytest.approx(0.15))
    assert (pooled.coverage, pooled.half_width) == (pytest.approx(2 / 3), pytest.approx(0.3))


def test_identity_table_lists_every_series_once_and_series_of_one_run_agree():
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

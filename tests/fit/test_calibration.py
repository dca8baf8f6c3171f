"""Nominal coverage: 90 % intervals of parameters and new measurements over synthetic runs."""

import pytest
from sampling import sampled
from synthetic import SCENARIOS, coverage


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled("calibration", SCENARIOS, 2))
def test_nominal_coverage_over_synthetic_runs(name):
    points, parameters = coverage(SCENARIOS[name], runs=100)
    assert 0.86 <= points <= 0.95 and 0.86 <= parameters <= 0.98

"""The study of cadence and seeds: what common seeds do to noise and forecast, and their correlation in a run."""

import json
from pathlib import Path

import numpy as np
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "validation_noise.py"


@pytest.mark.slow
def test_common_seeds_make_successive_points_agree_and_the_forecast_worse(bench):
    common, fresh = (bench.errors(2, 80, length, runs=150) for length in (28.0, 0.0))
    assert common[2] < 0.4 * fresh[2], "noise of the difference of successive validations"
    assert common[0] > 1.1 * fresh[0], "error of the true curve"


def test_the_noise_of_simulated_points_has_the_binomial_variance(bench):
    steps, sizes = np.array([1e-6, 4.0, 8.0]), np.array([600.0, 100.0, 100.0])
    independent = bench.covariance(steps, sizes, 0.0)
    assert np.allclose(independent, np.diag(1 / sizes))
    common = bench.covariance(steps, sizes, 28.0)
    assert np.allclose(np.diag(common), 1 / sizes)
    assert common[1, 2] == pytest.approx(np.exp(-4 / 28) / 100)
    assert common[0, 1] == pytest.approx(np.exp(-4 / 28) / 600), (
        "the shared completions are a part of the larger one's"
    )


@pytest.mark.parametrize(("seeds", "expected"), [("common", 1.0), ("fresh", 0.0)])
def test_the_correlation_is_that_within_prompts(bench, tmp_path, seeds, expected):
    """Prompts of pass rates 0.1 to 0.9: what lies between them is no correlation of the noise."""
    rng = np.random.default_rng(0)
    rates = rng.uniform(0.1, 0.9, 2000)[:, None]
    first = rng.random((2000, 4)) < rates
    second = first if seeds == "common" else rng.random((2000, 4)) < rates
    with open(tmp_path / "validation_by_prompt.jsonl", "w") as file:
        for step, won in ((0, first), (3, second)):
            letters = "".join("1" if x else "0" for x in won.ravel())
            file.write(json.dumps({"step": step, "by_prompt": [0.5] * 2000, "outcomes": letters}) + "\n")
    [(lag, found)] = bench.correlations(tmp_path)
    assert lag == 3 and found == pytest.approx(expected, abs=0.03)

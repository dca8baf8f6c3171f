"""The curve itself: published numbers, derivatives, extremes, inverse, transform."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_scalerl.fit.sigmoid import compute_to_reach, sigmoid

PUBLISHED = yaml.safe_load((Path(__file__).parents[1] / "data/published_sigmoids.yaml").read_text())
RUN = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial": 0.4002}


@pytest.mark.parametrize("published", PUBLISHED)
def test_published_values(published):
    values = published["values"]
    curve = sigmoid(list(values), **published["parameters"])
    np.testing.assert_allclose(curve, list(values.values()), atol=1e-4)


def test_finite_and_bounded_for_any_compute():
    with np.errstate(all="raise", under="ignore"):
        curve = sigmoid(np.array([1e-300, 1e-9, 1.0, 1e9, 1e300]), **RUN)
        steep = sigmoid(np.array([1e-300, 1e300]), **{**RUN, "exponent": 50.0})
    assert curve[0] == pytest.approx(0.4002, abs=1e-12) and curve[-1] == pytest.approx(0.61, abs=1e-12)
    assert np.all(np.diff(curve) >= 0)
    np.testing.assert_array_equal(steep, [0.4002, 0.61])


@pytest.mark.parametrize("compute", [0.0, -1.0, float("nan")])
def test_compute_must_be_positive(compute):
    with pytest.raises(ValueError, match=r"^compute is "):
        sigmoid([10.0, compute], **RUN)


def test_compute_to_reach_inverts_the_curve():
    compute = np.array([100.0, 2542.0, 40000.0])
    np.testing.assert_allclose(compute_to_reach(sigmoid(compute, **RUN), **RUN), compute, rtol=1e-9)
    assert compute_to_reach(0.61, **RUN) == np.inf
    assert compute_to_reach(0.7, **RUN) == np.inf
    assert compute_to_reach(0.4, **RUN) == 0.0

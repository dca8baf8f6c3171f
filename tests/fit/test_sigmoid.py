"""The curve itself: published numbers, derivatives, extremes, inverse, transform."""

import numpy as np
import pytest

from megatron_scalerl.fit.sigmoid import compute_to_reach, sigmoid

PUBLISHED = [
    # Khatri et al. 2025, Table 1 and figures: (R_0, A, C_mid, B), {C: R(C)}
    ((0.4002, 0.610, 2542, 1.92), {1500: 0.4561, 2542: 0.5051, 4000: 0.5481, 8000: 0.5891, 16000: 0.6040}),
    ((0.4018, 0.645, 10909, 1.70), {1500: 0.4099, 10909: 0.5234, 50000: 0.6280, 100000: 0.6395}),
    ((0.3962, 0.645, 11272, 1.89), {1500: 0.4016, 8000: 0.4816, 16000: 0.5603, 40000: 0.6242}),
    ((0.5115, 0.710, 6909, 1.66), {1500: 0.5261, 8000: 0.6228, 16000: 0.6705, 45000: 0.7015}),
]
RUN = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542.0, "initial": 0.4002}


@pytest.mark.parametrize("parameters, values", PUBLISHED)
def test_published_values(parameters, values):
    initial, asymptote, midpoint, exponent = parameters
    curve = sigmoid(list(values), asymptote=asymptote, exponent=exponent, midpoint=midpoint, initial=initial)
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

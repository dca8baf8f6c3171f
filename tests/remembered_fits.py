"""Posteriors that several tests sample from the same points are sampled once."""

import pickle

import pytest

from megatron_scalerl.fit import forecast, posterior

MADE = {}
"""Pickled arguments -> the posterior. The same arguments give the same bits (tests/fit/test_robust_method.py)."""


@pytest.fixture(autouse=True)
def remembered_fits(monkeypatch):
    """Everything around the sampling, such as weights of outliers, is computed by each test."""

    def sample(*arguments, **options):
        key = pickle.dumps((arguments, options))
        if key not in MADE:
            MADE[key] = posterior.sample(*arguments, **options)
        return MADE[key]

    monkeypatch.setattr(forecast, "sample", sample)

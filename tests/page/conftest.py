"""Fits are remembered over tests; a served page looks for new records all the time."""

import pytest
from remembered_fits import remembered_fits

__all__ = ["remembered_fits"]


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    """Nothing has to wait for the next look at the files."""
    monkeypatch.setattr("megatron_scalerl.page.server.POLL_S", 0.02)

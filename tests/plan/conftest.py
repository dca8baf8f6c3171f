"""Plans of this folder simulate a short queue: its length decides no memory and no size."""

import pytest


@pytest.fixture(autouse=True)
def short_queue(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.plan.planner.COMPLETIONS", 2_000)

"""For every test."""

import pytest
from own_processes import adopt_orphans


@pytest.fixture(autouse=True, scope="session")
def orphans_stay_below_this_process():
    """Tests look for what is left of a run among the processes below this one."""
    adopt_orphans()

"""What tests of this folder share ends with their file: other tests look at the processes of this one."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def shared_decoders_end():
    yield
    if "scripted_episodes" in sys.modules:
        sys.modules["scripted_episodes"].close()

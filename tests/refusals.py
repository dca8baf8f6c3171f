"""Refusals of invalid input."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(said):
    """The block raises ValueError with one line in which this pattern is found."""
    with pytest.raises(ValueError, match=said) as caught:
        yield
    assert "\n" not in str(caught.value)

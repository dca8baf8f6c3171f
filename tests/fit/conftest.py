"""Fits are remembered over tests."""

from remembered_fits import remembered_fits

__all__ = ["remembered_fits"]

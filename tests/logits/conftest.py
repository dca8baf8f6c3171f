"""Tests marked `gpu` are deselected where PyTorch sees no GPU."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]

"""The tools as modules, without their folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The file that the test module calls TOOL, imported anew."""
    path = request.module.TOOL
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]

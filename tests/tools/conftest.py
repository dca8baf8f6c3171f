"""The tools as modules, without their folder on the path."""

import importlib.util
import sys

import pytest


@pytest.fixture
def bench(request):
    """The file that the test module calls TOOL, imported anew."""
    path = request.module.TOOL
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]

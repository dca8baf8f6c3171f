"""The examples in docstrings run and give what they show."""

import doctest
import inspect

import pytest

from megatron_scalerl import types
from megatron_scalerl.rollouts import gate


@pytest.mark.parametrize("module", [types, gate], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_run_in_order(module):
    """In one namespace: examples may continue those above them."""
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    namespace = dict(vars(module))
    for test in sorted(tests, key=lambda test: test.lineno):
        test.globs = namespace
        runner.run(test, clear_globs=False)
    assert tests and runner.summarize() == doctest.TestResults(0, runner.tries)


def test_every_dataclass_passed_between_stages_has_an_example():
    found = {name for name, cls in inspect.getmembers(types, inspect.isclass) if hasattr(cls, "__dataclass_fields__")}
    assert len(found) >= 10
    assert [name for name in found if "Example:" not in inspect.getdoc(getattr(types, name))] == []

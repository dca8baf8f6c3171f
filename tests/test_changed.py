"""Which tests a change concerns: by import, by name in a string, by a fixture, and by a file that is no code."""

import pytest
from changed import Closures


@pytest.fixture(scope="module")
def closures():
    return Closures()


@pytest.mark.parametrize(
    "test, needs, ignores",
    [
        ("tests/rollouts/test_gate.py", "megatron_scalerl/rollouts/gate.py", "megatron_scalerl/fit/sigmoid.py"),
        ("tests/fit/test_sigmoid.py", "megatron_scalerl/fit/sigmoid.py", "megatron_scalerl/trainer/step.py"),
        # a run starts ranks and engines by the names of their modules
        ("tests/e2e/test_train.py", "megatron_scalerl/trainer/step.py", "tests/fit/test_sigmoid.py"),
        # by a fixture
        ("tests/e2e/test_train.py", "tests/e2e/conftest.py", "tests/fit/conftest.py"),
        ("tests/slurm/test_submit.py", "megatron_scalerl/cluster/templates/job.sbatch", "tests/fit/conftest.py"),
    ],
)
def test_a_closure_holds_what_a_test_needs(closures, test, needs, ignores):
    closure = closures.of(test)
    assert needs in closure
    assert ignores not in closure

"""The logit projection's memory where the recipe states none."""

import pytest

from megatron_scalerl.logits.choice import workspace_mb


@pytest.mark.parametrize(
    "stated, large, shared, mib",
    [(None, False, False, 512), (None, True, False, 2048), (None, True, True, 512), (1024.0, True, True, 1024)],
)
def test_it_is_stated_or_that_of_the_device(stated, large, shared, mib):
    assert workspace_mb(stated, large_gpu=large, shared=shared) == mib

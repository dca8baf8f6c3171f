"""A later attempt of a run's job is noticed by what is left of the one before."""

import pytest

from megatron_scalerl.processes.signals import ATTEMPT_FILE, Takeover


@pytest.mark.parametrize(
    "before, after, happened",
    [
        ("7.0\n", "7.0\n", False),
        ("7.0\n", "9.0\n", True),
        ("7.0\n", None, False),
        ("7.0\n", "", False),
        (None, "7.0\n", True),
    ],
)
def test_another_attempt_in_the_file_is_a_takeover(tmp_path, before, after, happened):
    file = tmp_path / ATTEMPT_FILE
    file.parent.mkdir()
    if before is not None:
        file.write_text(before)
    takeover = Takeover(tmp_path)
    file.unlink(missing_ok=True)
    if after is not None:
        file.write_text(after)
    assert takeover.happened is happened

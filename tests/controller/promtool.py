"""Prometheus' own checker, `promtool`, where it is installed (Debian's package prometheus has it)."""

import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: the package prometheus)"
)


def promtool(*words):
    """Run it; fails with what it says."""
    done = subprocess.run(["promtool", *words], capture_output=True, timeout=240, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said

"""A sample of many cases: CI runs some of them, other ones for each commit; `tests/run.sh --all` runs each."""

import os
import random
import subprocess
from pathlib import Path

import pytest


def tree_hash():
    """Hash of the committed tree, so that a commit is always tested by the same cases; without git a constant."""
    command = ["git", "rev-parse", "HEAD^{tree}"]
    known = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return known.stdout.strip() or "no git"


SEED = os.environ.get("MSRL_TEST_SEED") or os.environ.setdefault("MSRL_TEST_SEED", tree_hash())
"""Printed at the head of every run; the variable repeats a sample. Workers inherit it: all collect the same cases."""


def sampled(name, cases, count):
    """Parameters of a test: `count` cases drawn by SEED and `name`, the others marked `full`."""
    cases = list(cases)
    chosen = set(random.Random(f"{SEED} {name}").sample(range(len(cases)), count))
    whole = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if number in chosen else pytest.mark.full) for number, case in enumerate(whole)
    ]

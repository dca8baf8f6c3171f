"""A sample of many cases: CI runs some of them, other ones every day; `tests/run.sh --all` runs each."""

import os
import random
from datetime import date

import pytest

SEED = os.environ.setdefault("MSRL_TEST_SEED", date.today().isoformat())
"""Printed at the head of every run; the variable repeats a sample. Workers inherit it: all collect the same cases."""


def sampled(name, cases, count):
    """Parameters of a test: `count` cases drawn by SEED and `name`, the others marked `full`."""
    cases = list(cases)
    chosen = set(random.Random(f"{SEED} {name}").sample(range(len(cases)), count))
    whole = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if number in chosen else pytest.mark.full) for number, case in enumerate(whole)
    ]

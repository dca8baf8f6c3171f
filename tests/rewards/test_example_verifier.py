"""The example of a custom verifier runs and scores as documented."""

import sys
from pathlib import Path

from programs import ended

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_verifier.py"


def test_the_example_scores_five_answers():
    done = ended(sys.executable, EXAMPLE)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["[1,", "2]", "reward", "+1.0"],
        ["[2,", "1]", "reward", "+0.5"],
        ["[1,", "3]", "reward", "-1.0"],
        ["one", "and", "two", "reward", "-1.0", "error"],
        ["None", "reward", "-1.0", "no_answer"],
    ]
    assert "JSONDecodeError" in done.stderr, "the first error is shown"

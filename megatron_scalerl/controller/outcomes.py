"""What a validation found for each completion, and what a fit needs of it.

The noise of a pass rate is that of its completions given their prompts: the variance within prompts. With
validation.fresh_seeds off, the same completion of two validations has the same random numbers, and their noise is
correlated: that is in the single outcomes, not in the pass rates. They are in RUN/validation_by_prompt.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Outcomes = tuple[tuple[bool | None, ...], ...]
"""[prompts][generations] True: correct; None: lost, left out of every pass rate."""
_LETTERS = {True: "1", False: "0", None: "-"}


def means(outcomes: Outcomes) -> tuple[float, ...]:
    """[prompts] pass rate of each prompt over the completions that were not lost."""
    kept = [[x for x in row if x is not None] for row in outcomes]
    return tuple(sum(row) / len(row) for row in kept)


def text(outcomes: Outcomes) -> str:
    """The outcomes as one letter per completion, prompt after prompt: 1 correct, 0 wrong, - lost."""
    return "".join(_LETTERS[x] for row in outcomes for x in row)


def within_variance(outcomes: Iterable[Sequence[bool | None]]) -> float | None:
    """The mean over prompts of the variance p (1 - p) of one completion, unbiased; None below two completions each.

    The binomial variance of a pass rate of N completions is this over N, given the prompts. p (1 - p) of the mean is
    larger, by the variance between prompts. Prompts with fewer than two completions are left out.
    """
    kept = [[x for x in row if x is not None] for row in outcomes]
    found = [sum(row) * (len(row) - sum(row)) / (len(row) * (len(row) - 1)) for row in kept if len(row) > 1]
    return sum(found) / len(found) if found else None

"""Finds training prompts that contain text of evaluation problems, by comparing word n-grams.

The rule comes from Brown et al. 2020 (arXiv 2005.14165, appendix C): a training prompt hits a problem if both have a
sequence of n = 13 words in common. For mathematics, operators (+ - * / ^ = < >) also count as words, since 3 - 5 and
3 + 5 are not the same problem. Words are runs of letters or of digits, in lower case, after Unicode's NFKC.

A problem with fewer than n words is compared as a whole. A problem of 8 words (the paper's smallest n) or more is hit
by any prompt that contains the problem. A shorter problem is hit only by a prompt of exactly these words, because
short sequences recur by chance.
"""

import heapq
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.prompts.layouts import Layout
from megatron_scalerl.prompts.sources import read_rows
from megatron_scalerl.record import record

WORDS = 13
"""Number of words of an n-gram."""
SHORTEST = 8
"""A problem with fewer words is hit only by a training prompt of exactly these words."""
MOST_HITS = 100
"""Largest number of hits of a problem that are kept, the hits with the largest shares.

The number is limited because an instruction with which all prompts and problems begin makes a hit for each pair.
"""
_WORD = re.compile(r"\d+|[^\W\d_]+|[-+*/^=<>]")
_MINUS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/"})


@record
class Text:
    """A training prompt or an evaluation problem."""

    where: str
    """File and line or row, for error messages."""
    text: str


def training_texts(sources: Iterable[str]) -> Iterator[Text]:
    """The texts of `FILE`, or `FILE:COLUMN`. Raises ValueError for a missing file or column."""
    for source in sources:
        path, colon, column = source.rpartition(":")
        if not colon or Path(source).exists():
            path = source
            column = "prompt"
        layout = Layout(name=column, question=(column,), reference=())
        for row in read_rows(path):
            yield Text(where=row.where, text=layout.question_of(row.readable()).text)


@record
class Hit:
    """A training prompt and an evaluation problem with an n-gram in common."""

    training: Text
    problem: Text
    share: float
    """Share of the problem's n-grams that the prompt has: 1 for a prompt that contains the problem."""


@record
class Contamination:
    """The hits of some training prompts on some problems. Produced by `contamination`."""

    n: int
    training: int
    """Number of training prompts that were compared."""
    problems: int
    hits: tuple[Hit, ...]
    """Hits by problem, the largest share first, at most MOST_HITS of each."""
    all_hits: int
    """Number of hits, kept or not."""
    training_hit: int
    """Number of training prompts with a hit."""

    @property
    def problems_hit(self) -> frozenset[str]:
        """`where` of the problems that a training prompt hits."""
        return frozenset(hit.problem.where for hit in self.hits)

    def line(self) -> str:
        """The result as a line of text."""
        return (
            f"{len(self.problems_hit)} of {self.problems} evaluation problems "
            f"({_percent(len(self.problems_hit), self.problems)}) share {self.n} words in a row, or all of a shorter "
            f"problem, with {self.training_hit} of {self.training} training prompts "
            f"({_percent(self.training_hit, self.training)})"
        )

    def rows(self) -> list[dict[str, Any]]:
        """The hits that are kept as JSON objects."""
        return [
            {"training": hit.training.where, "problem": hit.problem.where, "share": round(hit.share, 4)}
            for hit in self.hits
        ]


def words(text: str) -> tuple[str, ...]:
    """The normalized words of a text."""
    # NFKC unifies digits and letters, but keeps the signs that _MINUS replaces.
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).translate(_MINUS).casefold()))


def contamination(training: Iterable[Text], problems: Sequence[Text], *, n: int = WORDS) -> Contamination:
    """The hits of all training prompts on all problems, by sequences of `n` words.

    Memory is linear in the length of the texts, time in this length and the number of hits.
    """
    grams, whole_texts, totals = _index(problems, n)
    lengths = sorted({len(gram) for gram in grams})
    count = all_hits = 0
    prompts_hit = set()
    # The heaps are ordered by (share, minus the prompt's number), so that the smallest share is left out, and the
    # later prompt first.
    best_hits: list[list[tuple[float, int, Text]]] = [[] for _ in problems]
    for count, prompt in enumerate(training, 1):
        prompt_words = words(prompt.text)
        # An equal prompt has all of a short problem, so the problem's text counts as the only n-gram.
        shared: dict[int, int] = dict.fromkeys(whole_texts.get(prompt_words, ()), 1)
        for length in lengths:
            for gram in _grams(prompt_words, length):
                for number in grams.get(gram, ()):
                    shared[number] = shared.get(number, 0) + 1
        for number, common in shared.items():
            # The prompt's number is unique in a heap, so that texts, which have no order, are never compared.
            heapq.heappush(best_hits[number], (common / totals[number], -count, prompt))
            if len(best_hits[number]) > MOST_HITS:
                heapq.heappop(best_hits[number])
        if shared:
            prompts_hit.add(prompt.where)
            all_hits += len(shared)
    return Contamination(
        n=n,
        training=count,
        problems=len(problems),
        hits=tuple(
            Hit(training=prompt, problem=problem, share=share)
            for problem, heap in zip(problems, best_hits)
            for share, _, prompt in sorted(heap, key=lambda entry: entry[:2], reverse=True)
        ),
        all_hits=all_hits,
        training_hit=len(prompts_hit),
    )


_Index = dict[tuple[str, ...], list[int]]


def _index(problems: Sequence[Text], n: int) -> tuple[_Index, _Index, list[int]]:
    """(n-gram -> indices of problems, whole text -> indices of problems that only an equal prompt hits, number of
    n-grams of each problem)"""
    grams: _Index = {}
    whole_texts: _Index = {}
    totals = []
    for number, problem in enumerate(problems):
        problem_words = words(problem.text)
        if len(problem_words) < min(n, SHORTEST):
            totals.append(1)
            # A problem without words would be hit by every prompt without words.
            if problem_words:
                whole_texts.setdefault(problem_words, []).append(number)
            continue
        problem_grams = _grams(problem_words, min(n, len(problem_words)))
        totals.append(len(problem_grams))
        for gram in problem_grams:
            grams.setdefault(gram, []).append(number)
    return grams, whole_texts, totals


def _grams(text: tuple[str, ...], length: int) -> set[tuple[str, ...]]:
    return {text[start : start + length] for start in range(len(text) - length + 1)}


def _percent(part: int, total: int) -> str:
    if not total:
        return "none"
    return f"{100 * part / total:.1f} %"

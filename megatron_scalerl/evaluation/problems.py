"""Reads evaluation files: AIME and MATH-500 as published on the Hugging Face hub, and any other JSONL or Parquet.

    schema            problem                        answer          id
    aime              Problem, problem or question   Answer, answer  ID, id or problem_idx
    math500           problem                        answer          unique_id; subject and level are kept as labels
    PROBLEM,ANSWER    the column PROBLEM             column ANSWER   id or unique_id, if there is one

The AIME columns come from Maxwell-Jia/AIME_2024 (ID, Problem, Solution, Answer), HuggingFaceH4/aime_2024 and
math-ai/aime25 (id, problem, answer), opencompass/AIME2025 (question, answer) and MathArena/aime_2025 (problem_idx,
problem, answer), the MATH-500 columns from HuggingFaceH4/MATH-500. Without a schema the columns decide.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.evaluation.contamination import Text
from megatron_scalerl.prompts.layouts import as_text
from megatron_scalerl.prompts.sources import Row, other_columns, read_rows, refuse_surrogates
from megatron_scalerl.recipe.hub import hint, local_path
from megatron_scalerl.record import record

AIME = "aime"
MATH500 = "math500"
_COLUMNS = re.compile("[^,:/]+,[^,:/]+")
_AIME_PROBLEM = ("Problem", "problem", "question")
_AIME_ANSWER = ("Answer", "answer")
_SCHEMA_COLUMNS = {
    AIME: (_AIME_PROBLEM, _AIME_ANSWER, ("ID", "id", "problem_idx")),
    MATH500: (("problem",), ("answer",), ("unique_id",)),
}
"""Schema -> names that the columns of the problem, the answer and the id may have."""


@record
class Problem(Text):
    """A row of an evaluation file. Produced by `read_problems`."""

    number: int
    """Number of the row in the file, from 1."""
    problem_id: str
    """The row's id; its number if the row has no id."""
    answer: str
    """The reference answer that the verifier compares with."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """MATH-500: subject and level."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every column except problem and answer, for a custom verifier, as in training."""


@record
class ProblemFile:
    """The problems of one file. Produced by `read_problems`."""

    path: str
    schema: str
    """aime, math500, or PROBLEM,ANSWER."""
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """The file's name without ending, which names the results."""
        return Path(self.path).stem

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all problems and answers in the file's order.

        With the schema PROBLEM,ANSWER the digest also covers every other column, because a custom verifier may read
        all columns.
        """
        content: list[list[Any]] = []
        for problem in self.problems:
            extra = None
            if self.schema not in _SCHEMA_COLUMNS:
                extra = problem.extra
            content.append([problem.text, problem.answer, extra])
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def split_schema(text: str) -> tuple[str, str | None]:
    """(path, schema) of `FILE`, `FILE:aime`, `FILE:math500` or `FILE:PROBLEM,ANSWER`. For `FILE` the schema is None.

    Raises ValueError for an unknown schema after the last colon, unless a file is named like the whole text.
    """
    path, colon, schema = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, None
    if schema in _SCHEMA_COLUMNS or _COLUMNS.fullmatch(schema):
        return path, schema
    raise ValueError(f"{text}: expected FILE, FILE:{AIME}, FILE:{MATH500} or FILE:PROBLEM,ANSWER, found {schema!r}")


def read_problems(path: str, schema: str | None = None) -> ProblemFile:
    """The problems of a .jsonl or .parquet file, or of a dataset with one split: a folder or a name on the hub.

    schema: aime, math500 or "PROBLEM,ANSWER"; None: the columns decide. Raises ValueError, in one line with file and
    row, for a missing file, columns of no known schema, an empty problem, a missing answer, and a file without rows.
    """
    local = local_path(path, "dataset")
    advice = hint(path, "dataset")
    if advice and not Path(local).exists():
        raise ValueError(f"{path}: there is no such file or folder{advice}")
    rows = [row.readable() for row in read_rows(local)]
    if not rows:
        raise ValueError(f"{path}: the file has no problem")
    schema = schema or _schema_of(path, rows[0])
    names = set()
    problems = []
    for number, row in enumerate(rows, 1):
        problem = _problem(row, schema, number)
        if problem.problem_id in names:
            raise ValueError(f"{row.where}: an earlier row has the id {problem.problem_id!r}, too")
        names.add(problem.problem_id)
        problems.append(problem)
    return ProblemFile(path=path, schema=schema, problems=tuple(problems))


def _schema_of(path: str, row: Row) -> str:
    columns = set(row.values)
    if {"problem", "answer", "unique_id", "subject"} <= columns:
        return MATH500
    if {"prompt", "answer"} <= columns:
        return "prompt,answer"
    if columns & set(_AIME_PROBLEM) and columns & set(_AIME_ANSWER):
        return AIME
    names = ", ".join(sorted(map(str, columns)))
    raise ValueError(f"{path}: the columns {names} fit no schema; name the columns to use, as in FILE:PROBLEM,ANSWER")


def _problem(row: Row, schema: str, number: int) -> Problem:
    column, _, answer_column = schema.partition(",")
    problems, answers, ids = _SCHEMA_COLUMNS.get(schema, ((column,), (answer_column,), ("id", "unique_id")))
    problem = _first(row, problems)
    answer = _first(row, answers)
    values = [row.values[name] for name in ids if row.values.get(name) is not None]
    problem_id = str(next(iter(values), number))
    labels: dict[str, str] = {}
    if schema == MATH500:
        labels = {name: str(row.values[name]) for name in ("subject", "level") if name in row.values}
    for text in (*map(str, values), *labels.values()):
        refuse_surrogates(row.where, "id", text)
    return Problem(
        number=number,
        where=row.where,
        problem_id=problem_id,
        text=as_text(row, problem, row.values[problem]),
        answer=as_text(row, answer, row.values[answer]),
        labels=labels,
        extra=other_columns(row, (problem, answer)),
    )


def _first(row: Row, names: Sequence[str]) -> str:
    for name in names:
        if name in row.values:
            return name
    columns = ", ".join(map(str, row.values))
    raise ValueError(f"{row.where}: there is no column {' or '.join(map(repr, names))}; the columns are {columns}")

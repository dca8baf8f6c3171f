"""The result of an evaluation on disk: every finished completion, then a summary.

    OUT/completions.jsonl   a header with the evaluation's identity, then one row per completion (mode 0600)
    OUT/summary.json        written atomically after the last completion

A stopped evaluation resumes: completions with a row in the file are not generated again. A file of another evaluation
(policy, problems, seed, settings) is refused. Rows may be in any order.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.checkpoints.jsonl import JsonlWriter, read_jsonl
from megatron_scalerl.evaluation.estimators import Outcomes
from megatron_scalerl.fit.inputs import differing
from megatron_scalerl.record import record

COMPLETIONS = "completions.jsonl"
SUMMARY = "summary.json"
FORMAT = 1
"""Number of the format of completions.jsonl and summary.json, written into both files."""


@record
class Header:
    """The identity of an evaluation: two evaluations with equal headers have the same completions."""

    policy: str
    """The folder, or the run and its step."""
    digest: str
    """Digest of the policy's files (`inputs.policy_digest`); empty for a run, whose step names the weights."""
    version: int
    """The policy version that every completion must have: a run's step, 0 for a folder."""
    files: tuple[tuple[str, str], ...]
    """(name, digest of the problems) of each file."""
    seed: int
    settings: dict[str, Any]
    """Settings of the recipe that decide prompts, sampling and scores (`inputs.settings`)."""
    format: int = FORMAT


@record
class Key:
    """The identity of a completion of a problem at a thinking budget."""

    file: str
    """The value of `ProblemFile.name`."""
    number: int
    """Number of the problem in the file, from 1."""
    index: int
    """Number of the completion, from 0."""
    budget: int | None = None
    """Thinking tokens; None: the recipe's interruption."""


@record
class Row:
    """A finished completion. Produced by `completing.row_of`."""

    key: Key
    problem_id: str
    correct: bool
    reason: str = ""
    """The value of `types.Score.reason`."""
    tokens: int = 0
    """Tokens of the completion, forced tokens included."""
    sampled_tokens: int = 0
    interrupted: bool = False
    truncated: bool = False
    versions: tuple[int, int] = (0, 0)
    """Policy version of the first and of the last token."""
    seed: int = 0
    cut: int = 0
    """Thinking tokens after which thinking is interrupted, 0 without interruption."""
    lost: str = ""
    """The reason why the completion is lost (`types.CompletionLost`), else empty. A lost completion is in no rate."""
    text: str = ""
    """The completion as text, with special tokens."""


class ResultInUse(ValueError):
    """Another process writes this result."""


class OtherResult(ValueError):
    """The folder has the completions of another evaluation, or damaged completions."""


class ProblemLost(ValueError):
    """All completions of a problem are lost, so there is no score of all problems."""


class ResultFile(AbstractContextManager["ResultFile"]):
    """OUT/completions.jsonl, open for rows until exit from the block, and locked by this process."""

    def __init__(self, folder: Path, header: Header):
        """Create the result in `folder`, or continue an unfinished result there.

        Raises ResultInUse for a folder that another process writes to, and OtherResult for a folder with a damaged
        evaluation or with another evaluation; nothing is changed then.
        """
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_file(self.folder / "lock")
        except BlockingIOError:
            raise ResultInUse(f"{folder}: another evaluation runs in this folder; choose another folder") from None
        try:
            self.path = self.folder / COMPLETIONS
            self.rows = _rows(self.path, header)
            self._file = JsonlWriter(self.path, private=True)
            # The header is synced first, so that no row is on the disk without the header.
            if not self._file.size:
                self._file.append({"header": header})
                self._file.sync()
        except BaseException:
            # A failed constructor returns no object that could close the lock, so a second try would be refused.
            os.close(self._lock)
            raise

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """The keys to generate: keys without a row, and keys of a problem whose completions are all lost."""
        # A problem whose completions are all lost has no score and fails the evaluation, so the problem is tried
        # again.
        scored_problems = {_problem_of(key) for key, row in self.rows.items() if not row.lost}
        return [key for key in keys if key not in self.rows or _problem_of(key) not in scored_problems]

    def append(self, row: Row) -> None:
        """Add a finished completion. Raises OSError naming the file."""
        self._file.append(row)
        self.rows[row.key] = row

    def finish(self, summary: dict[str, Any]) -> Path:
        """Write the summary once every row is on the disk; returns the summary's path. Raises OSError if a file
        cannot be written."""
        self._file.sync()
        path = self.folder / SUMMARY
        write_durably(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        return path

    def __exit__(self, *_: object) -> None:
        self._file.close()
        os.close(self._lock)


def _problem_of(key: Key) -> tuple[str, int, int | None]:
    return key.file, key.number, key.budget


def _rows(path: Path, header: Header) -> dict[Key, Row]:
    """The rows of an existing file. A new file has no rows. Raises OtherResult for damaged rows, or for a header that
    is not `header`."""
    try:
        lines = read_jsonl(path)
    except ValueError as error:
        raise OtherResult(str(error)) from None
    if lines:
        _check_header(path, lines[0].get("header"), header)
    rows = {}
    for number, data in enumerate(lines[1:], 2):
        try:
            row = msgspec.convert(data, Row)
        except msgspec.ValidationError as error:
            raise OtherResult(f"{path} line {number}: the line is not a completion: {error}") from None
        rows[row.key] = row
    return rows


def _check_header(path: Path, header_on_disk: Any, header: Header) -> None:
    expected = msgspec.json.decode(msgspec.json.encode(header))
    if not isinstance(header_on_disk, dict):
        raise OtherResult(f"{path}: the first line is not the header of an evaluation; choose another folder")
    if expected["digest"]:
        # The digest identifies the policy. So the folder's path may differ.
        header_on_disk["policy"] = expected["policy"]
    for key, was, now in differing(header_on_disk, expected):
        raise OtherResult(f"{path}: the file is of another evaluation: {key}: {was!r}, not {now!r}")


@record
class Cell:
    """The completions of one evaluation file at one thinking budget. Produced by `cells`."""

    file: str
    budget: int | None
    rows: tuple[tuple[Row, ...], ...] = field(repr=False)
    """For each of P problems, the rows of the completions that are not lost, at least one."""
    lost: int

    @property
    def outcomes(self) -> Outcomes:
        """Whether each completion of each problem is correct."""
        return [[row.correct for row in rows] for rows in self.rows]


def cells(rows: Iterable[Row], keys: Sequence[Key]) -> list[Cell]:
    """The completions of `keys`, one cell for each file and budget in the order of the keys.

    Raises ValueError if a completion is missing, ProblemLost if all completions of a problem are lost.
    """
    by_key = {row.key: row for row in rows}
    grouped: dict[tuple[str, int | None], dict[int, list[Row]]] = {}
    for key in keys:
        if key not in by_key:
            raise ValueError(f"{key.file}: completion {key.index} of problem {key.number} is missing")
        grouped.setdefault((key.file, key.budget), {}).setdefault(key.number, []).append(by_key[key])
    result = []
    for (file, budget), problems in grouped.items():
        cell_rows = []
        lost = 0
        for number, completions in problems.items():
            cell_rows.append(tuple(row for row in completions if not row.lost))
            if not cell_rows[-1]:
                raise ProblemLost(f"{file}: problem {number}: all of its completions are lost")
            lost += len(completions) - len(cell_rows[-1])
        result.append(Cell(file=file, budget=budget, rows=tuple(cell_rows), lost=lost))
    return result

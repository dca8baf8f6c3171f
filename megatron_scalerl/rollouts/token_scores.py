"""Reads and writes files with the trainer's log-probability and entropy of each token (`controller.token_scores`).

RUN/token_scores/step_00000100.jsonl    a row for each completion that was scored before step 100
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.jsonl import read_jsonl, rewrite
from megatron_scalerl.record import record

FOLDER = "token_scores"


@record
class CompletionScores:
    """The trainer's scores of one completion's tokens; a row of a file."""

    group_id: int
    position: int
    """Position of the completion, or of the episode's part, in the block of the group."""
    policy_version: int
    """Version of the policy weights with which the trainer scored the completion."""
    logprobs: list[float]
    """[T] the trainer's log-probability of each token (nats)."""
    entropies: list[float]
    """[T] entropy of the trainer's distribution for each token (nats)."""


def write_scores(run_dir: Path, step: int, rows: Sequence[CompletionScores]) -> None:
    """Write the file of a step; replaces the file of an earlier attempt. Raises OSError if writing fails."""
    path = _path(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    rewrite(path, map(asdict, rows))


def read_scores(run_dir: Path, step: int) -> dict[tuple[int, int], CompletionScores]:
    """The scores of all completions that were scored before a step, by group id and position in the group's block.

    Empty if the step has no file.

    Raises ValueError, naming the file, for an invalid row.
    """
    path = _path(run_dir, step)
    try:
        rows = [msgspec.convert(row, CompletionScores) for row in read_jsonl(path)]
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: a row has no valid scores of tokens: {error}") from None
    return {(row.group_id, row.position): row for row in rows}


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step_{step:08}.jsonl"

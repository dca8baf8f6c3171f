"""Files of the trainer's log-probabilities and entropies of single tokens (`controller.token_scores`).

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
    """The scores of one completion, a row of a file."""

    group_id: int
    position: int
    """Position of the completion, or of a part of an episode, in the group's block."""
    policy_version: int
    """Version of the weights that scored the completion."""
    logprobs: list[float]
    """[T] the trainer's log-probabilities (nats)."""
    entropies: list[float]
    """[T] entropies of the distributions that the tokens were drawn from (nats)."""


def write_scores(run_dir: Path, step: int, rows: Sequence[CompletionScores]) -> None:
    """Write or replace a step's file. Raises OSError."""
    path = _path(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    rewrite(path, map(asdict, rows))


def read_scores(run_dir: Path, step: int) -> dict[tuple[int, int], CompletionScores]:
    """(group id, position) -> the scores before a step; empty without a file.

    Raises ValueError, naming the file, for an invalid row.
    """
    path = _path(run_dir, step)
    try:
        rows = [msgspec.convert(row, CompletionScores) for row in read_jsonl(path)]
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: a row holds no scores of tokens: {error}") from None
    return {(row.group_id, row.position): row for row in rows}


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step_{step:08}.jsonl"

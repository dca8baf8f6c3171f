"""Reads and writes files with the advantages and the dropped groups of each batch, for the run's page.

So the page needs no code of the user's algorithm to show advantages.

RUN/advantages/batch_00000012.json      written before the batch's step, and again if a resume trains the batch again
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import naming

FOLDER = "advantages"


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The advantages and the dropped groups of one batch. Produced by `controller.samples`."""

    advantages: Mapping[int, Mapping[int, float]]
    """Group id -> position of a completion in the group's block -> mean of the advantages of the completion's tokens.

    Only completions that are trained on have an entry."""
    dropped: Mapping[int, str]
    """Group id -> reason, in one word, why the group is not trained on."""


def write_trained(run_dir: Path, batch: int, trained: Trained) -> None:
    """Write the file of a batch, in place of any earlier file. Raises OSError naming the file."""
    path = _path(run_dir, batch)
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    try:
        # The file is not synced, as a sync would hold up the trainer: after a crash, a resume writes the file again.
        with naming(path):
            draft.write_bytes(msgspec.json.encode(trained))
            draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_trained(run_dir: Path, batch: int) -> Trained | None:
    """The advantages and dropped groups of a batch; None without a file. Raises ValueError naming the file."""
    path = _path(run_dir, batch)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Trained)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None


def _path(run_dir: Path, batch: int) -> Path:
    return run_dir / FOLDER / f"batch_{batch:08}.json"

"""Weights of a trainer from a Megatron checkpoint, by Megatron's own load, under whatever layout the trainer has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.safe_load import megatron


def load_megatron(chunks: Sequence[Any], path: str | Path) -> None:
    """Fill this rank's model chunks from a checkpoint that the converter wrote. Every rank must call it.

    Parameters convert to the model's type; rows that pad the vocabulary become 0. Of what is no tensor only modules'
    extra states are read, which must be empty. Raises ValueError for a folder that is no whole checkpoint, or not
    of this policy, and for parts of it that are not opened.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    wanted = {key: chunk.sharded_state_dict() for key, chunk in zip(keys, chunks)}
    state = megatron.load(wanted, path, common=False)
    for key, chunk in zip(keys, chunks):
        chunk.load_state_dict(state[key])

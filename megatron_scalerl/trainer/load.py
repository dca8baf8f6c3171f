"""Loads the weights of a Megatron checkpoint by Megatron's own load, under the trainer's parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.safe_load import megatron


def load_megatron(chunks: Sequence[Any], path: str | Path) -> None:
    """Load this rank's model chunks from a checkpoint of the converter. Every rank must call it.

    Parameters are cast to the model's type; rows that pad the vocabulary become 0. The only other data read are
    modules' extra states, which must be empty. Raises ValueError for a folder that is not a complete checkpoint, or
    not of this policy, and for parts that `safe_load` refuses.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    wanted = {key: chunk.sharded_state_dict() for key, chunk in zip(keys, chunks)}
    state = megatron.load(wanted, path, common=False)
    for key, chunk in zip(keys, chunks):
        chunk.load_state_dict(state[key])

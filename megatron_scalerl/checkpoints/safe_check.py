"""Tests whether a checkpoint is whole, before any process is started for it. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.checkpoints.safe_index import COMMON, COMMON_OBJECT, read_index


def check_checkpoint(path: str | Path) -> None:
    """Read the index of the `torch_dist` checkpoint at `path`, and check that its files hold what the index says.

    The load opens tensors and objects. Raises ValueError, naming the file and what was found, for an incomplete
    folder, an index with a name that is not allowed, a link, or a byte range outside the folder.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    index = read_index(path)
    index.check_files([*index.objects.values(), *(c for t in index.tensors.values() for c in t.chunks)])
    if COMMON_OBJECT not in index.objects:
        with PlainFile(path, COMMON):
            pass

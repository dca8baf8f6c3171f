"""Tests whether a checkpoint would open, before any process is started for it. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.checkpoints.safe_index import ByteRange, read_index
from megatron_scalerl.checkpoints.safe_values import COMMON, COMMON_OBJECT, describe, read_object, read_value


def check_checkpoint(path: str | Path) -> None:
    """Decode every pickle of the `torch_dist` checkpoint at `path` except its tensors', and discard the result.

    There may be tens of thousands of tensors: only their byte ranges are checked here, that the files exist and are
    long enough. The load decodes their pickles, with the same limits. Raises ValueError, naming the file and what was
    found, for an incomplete folder, a name that is not allowed, a link, or a byte range outside the folder.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    index = read_index(path)
    index.check_files([*index.objects.values(), *(c for t in index.tensors.values() for c in t.chunks)])
    if COMMON_OBJECT not in index.objects:
        with PlainFile(path, COMMON) as file:
            read_value(file, 0, file.size, describe)
    by_file: dict[str, list[tuple[str, ByteRange]]] = defaultdict(list)
    for key, item in index.objects.items():
        by_file[item.file].append((key, item))
    for name, objects in by_file.items():
        with PlainFile(path, name) as file:
            for key, item in objects:
                read_object(file, key, item, describe)

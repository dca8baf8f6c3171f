"""Says whether a checkpoint would open, before anything is started for it. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from megatron_scalerl.checkpoints.commit import COMMIT, read_commit
from megatron_scalerl.checkpoints.plain_files import PlainFile
from megatron_scalerl.safe_load.index import Place, read_index
from megatron_scalerl.safe_load.values import COMMON, describe, read_object, read_value


def check_checkpoint(path: str | Path) -> None:
    """Decode every pickle of the `torch_dist` checkpoint at `path` but those of its tensors, and make nothing of it.

    Tensors' pickles, of which there may be tens of thousands, are only looked up: that their files are there and
    long enough. The load decodes them, with the same limits. Raises ValueError, naming the file and what was found,
    for a folder that is not whole, a name that may not stand where it does, a link, or a place outside the folder.
    """
    path = Path(path)
    if (path / COMMIT).is_file() or not path.is_dir():
        read_commit(path)
    index = read_index(path)
    index.check_files([*index.objects.values(), *(c for t in index.tensors.values() for c in t.chunks)])
    with PlainFile(path, COMMON) as file:
        read_value(file, 0, file.size, describe)
    by_file: dict[str, list[tuple[str, Place]]] = defaultdict(list)
    for key, place in index.objects.items():
        by_file[place.file].append((key, place))
    for name, objects in by_file.items():
        with PlainFile(path, name) as file:
            for key, place in objects:
                read_object(file, key, place, describe)

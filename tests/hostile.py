"""Checkpoints with one part replaced: by a pickle that would make a folder, or by a place outside the folder."""

import io
import json
import os
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_scalerl.checkpoints.commit import COMMIT, write_commit

ADDED = "__99_0.distcp"


class Evil:
    """Unpickled, it makes the folder `marker`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def saved(value):
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def recommit(path):
    """COMMIT says the folder as it is now."""
    if (path / COMMIT).is_file():
        facts = json.loads((path / COMMIT).read_text())
        del facts["files"]
        write_commit(path, facts)


def edit_metadata(path, change):
    """Applies `change` to what .metadata holds; what it returns takes its place, unless that is None."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    changed = change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))
    recommit(path)


def first_key(path, *, objects, containing=""):
    """The index of an object, or of a tensor of the policy."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return next(
        i
        for i in metadata.storage_data
        if (i.offset is None) == objects and not i.fqn.startswith("optimizer") and containing in i.fqn
    )


def place(path, index, content):
    """The item is `content` now, in a file of its own."""
    (path / ADDED).write_bytes(content)
    edit_metadata(path, lambda m: m.storage_data.__setitem__(index, _StorageInfo(ADDED, 0, len(content))))

"""Files and folders that appear under their name whole or not at all, whenever a process or a machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file under a temporary name, sync it, rename it, and sync its folder.

    private: only its owner may read it (mode 0600).
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    mode = 0o600 if private else 0o666
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def publish_folder(folder: Path, name: Path) -> None:
    """Rename a folder whose files are synced, and sync its own folders and the parent of the new name."""
    for inner in {file.parent for file in folder.rglob("*")}:
        sync(inner)
    folder.rename(name)
    sync(name.parent)


def sync(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files that are there as a whole or not at all, whenever a process or a machine stops."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file under another name, sync it, rename it, and sync its folder.

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


def sync(path: Path) -> None:
    """The content of a file, or the names in a folder, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

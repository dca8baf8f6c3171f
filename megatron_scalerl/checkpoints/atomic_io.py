"""Atomic writes: a file or folder appears under a name complete or not at all, even if a process or machine stops."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MODES = {True: 0o600, False: 0o666}
"""Permissions of a new file before the umask: True for a file that only the owner may read, False for any other
file."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context manager that adds `path` to an OSError without a file name, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from None
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def write_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file under a temporary name, sync and rename the file, and sync the folder.

    private: only the owner may read the file (mode 0600). Raises OSError naming the file; `path` then keeps the
    content from before the call.
    """
    draft = path.with_name(f".{path.name}.draft")
    # A killed process may have left a draft, and another user a link. O_EXCL makes a new file, and follows no link.
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODES[private])
    try:
        with naming(path):
            try:
                write_all(handle, content)
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    # The content is on the disk before the rename, so after a crash `path` is whole, with old or new content.
    draft.replace(path)
    sync(path.parent)


def lock_file(path: Path) -> int:
    """Open a file, and lock the file (flock) until the caller closes the returned descriptor.

    Raises BlockingIOError if another process holds the lock.
    """
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # The kernel ends the lock together with the process, so a killed process leaves no lock.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def check_in_place(path: Path, handle: int, size: int) -> None:
    """Raise OSError unless `path` still is the open file `handle`, with at least `size` bytes.

    If the file at `path` was removed or replaced, the content of `handle` has no name any more, and is first copied
    to `path`.kept.
    """
    if path.exists() and os.path.samestat(os.stat(path), os.fstat(handle)):
        if os.fstat(handle).st_size < size:
            raise OSError(
                f"{path}: the file was shortened while the run wrote to it, to less than {size} bytes; restore the "
                "file from a copy, then start the run again"
            )
        return
    copy = path.with_name(f"{path.name}.kept")
    shutil.copy(f"/proc/self/fd/{handle}", copy)  # also copies the removed file's permissions
    raise OSError(
        f"{path}: the file was removed or replaced while the run wrote to it. The written rows are in {copy}; rename "
        f"that file to {path.name}, then start the run again"
    )


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`, by one system call if the system accepts all bytes at once. Raises OSError."""
    count = os.write(handle, data)
    while count < len(data):
        count += os.write(handle, memoryview(data)[count:])


def publish_folder(folder: Path, name: Path) -> None:
    """Rename `folder`, whose files the caller has synced, to `name`. Syncs all inner folders, and the parent of
    `name`."""
    for inner in {file.parent for file in folder.rglob("*")}:
        sync(inner)
    # The inner folders are synced before the rename, so after a crash a folder called `name` has all files.
    folder.rename(name)
    sync(name.parent)


def sync(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, are on the disk. path: the file or folder."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)

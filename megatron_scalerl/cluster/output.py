"""Checks of the file system of a run's folder: what `controller.run_folder` and `checkpoints` rely on is tried there.

Everything is done in a folder with a new name, which is removed at the end. Nothing is tried across hosts: locks that
a file system keeps on each host alone are recognized by its mount options only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_scalerl.checkpoints.atomic_io import lock_file, write_durably
from megatron_scalerl.cluster.check import Check, failed, guarded, ok, warning
from megatron_scalerl.cluster.mounts import mount_of

_ANOTHER = "choose an output_dir on another file system"


def existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def place_of(run_dir: Path) -> Path:
    """The folder that shows how a run's folder will behave: its parent, unless it is on a file system of its own."""
    parent = existing(run_dir.parent)
    return run_dir if run_dir.is_dir() and run_dir.stat().st_dev != parent.stat().st_dev else parent


def output_checks(run_dir: Path) -> list[Check]:
    """Kind of file system, canary and lock; the run's folder itself is not created."""
    place = run_dir
    try:
        place = place_of(run_dir)
        with _scratch(place) as folder:
            return [
                guarded("output folder", lambda: _kind(place)),
                guarded("output folder: write and sync", lambda: _canary(folder)),
                guarded("output folder: lock", lambda: lock_check(folder)),
            ]
    except OSError as error:
        found = f"{place}: {error.strerror}"
        return [failed("output folder", expected="a folder that can be written", found=found, remedy=_ANOTHER)]


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".megatron-scalerl-doctor-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kind(place: Path) -> Check:
    mount = mount_of(place)
    found = f"{place}: {mount.kind} at {mount.point}"
    if mount.local_locks:
        return warning(
            "output folder",
            expected="locks that all hosts see",
            found=f"{found}, mounted with {mount.local_locks}",
            remedy="two hosts could write one run's folder; start a run on one host at a time, or mount it otherwise",
        )
    if mount.kind in ("tmpfs", "ramfs", "overlay"):
        remedy = f"the run is lost with the host or its container: {_ANOTHER}"
        return warning("output folder", expected="a file system on a disk", found=found, remedy=remedy)
    return ok("output folder", found)


def _canary(folder: Path) -> Check:
    name, path, content = "output folder: write and sync", folder / "canary", secrets.token_bytes(65536)
    write_durably(path, content)
    if path.read_bytes() != content:
        return failed(name, expected="the bytes that were written", found="other bytes", remedy=_ANOTHER)
    return ok(name, f"{len(content):,} bytes written, synced, renamed and read again")


def lock_check(folder: Path) -> Check:
    """Whether a lock excludes a second one on the same file. Raises OSError."""
    name, path = "output folder: lock", folder / "lock"
    try:
        held = lock_file(path)
    except OSError as error:
        found = f"{errno.errorcode.get(error.errno or 0)}: {error.strerror}"
        return failed(name, expected="file locks (flock)", found=found, remedy=_ANOTHER)
    try:
        os.close(lock_file(path))
    except BlockingIOError:
        return ok(name, "flock excludes a second holder on this host")
    finally:
        os.close(held)
    return failed(name, expected="one holder of a lock", found="two at a time", remedy=_ANOTHER)

"""Folders that all of pytest's workers share: the first that asks makes one, the others wait for it."""

import fcntl
import os


def made_once(factory, name, make):
    """The folder `name` of this session, which `make(folder)` has filled in one of the workers."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            make(folder)
            made.touch()
    return folder

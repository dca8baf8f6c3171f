"""The run's secret in a file that only the owner can read, for processes on other hosts that share the folder.

Child processes on the same host get the secret in their environment, which no other user can read. For a program on
another host neither arguments nor environment would do, because all users can see both in the starting command.
"""

import os
import stat
from pathlib import Path

_LONGEST = 4096


def write_secret(path: Path, secret: str) -> None:
    """Write the secret to `path` with mode 0600. The folder is made if missing and gets mode 0700. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    # A file from an earlier start may have another mode or owner, so a new file is made.
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, secret.encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_secret(path: Path) -> str:
    """Read the secret. Raises ValueError if the file is empty or another user owns or can read the file, else
    OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # fstat checks the file that was opened. The path may name another file by now.
        status = os.fstat(handle)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
            raise ValueError(
                f"{path} belongs to user {status.st_uid} and has mode {mode:04o}; "
                f"it has to be a file of user {os.geteuid()} with mode 0600"
            )
        secret = os.read(handle, _LONGEST).decode()
    finally:
        os.close(handle)
    if not secret:
        raise ValueError(f"{path} is empty; it has to hold the secret of a run")
    return secret

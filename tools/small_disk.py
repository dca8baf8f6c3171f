"""A file system of its own for a run's folder, which can be filled up and given space again. Mounting needs root."""

import contextlib
import errno
import os
import subprocess

_BLOCK = 1 << 20


class SmallDisk:
    """A tmpfs of 256 MiB at a folder."""

    def __init__(self, folder):
        """Mount it. Raises CalledProcessError where that is not allowed."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._filler = folder / "filler"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", folder], check=True)

    def fill(self):
        """Take all space: the next byte that needs a new page is refused with ENOSPC."""
        with open(self._filler, "wb", buffering=0) as file:
            size = _BLOCK
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self):
        """Give the space back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._filler)

    def close(self):
        """Detach it, with all that is on it."""
        subprocess.run(["umount", "-l", self.folder], check=True)

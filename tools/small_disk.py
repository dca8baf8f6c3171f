"""A file system of its own for a run's folder, which can be filled up and given space again. Mounting needs root."""

import errno
import subprocess

_BLOCK = 1 << 20


class SmallDisk:
    """A tmpfs of 256 MiB at a folder."""

    def __init__(self, folder):
        """Mount it. Raises CalledProcessError where that is not allowed."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._filler = folder / "filler"
        subprocess.check_call(["mount", "-t", "tmpfs", "-o", "size=256m", "none", folder])

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
        self._filler.unlink(missing_ok=True)

    def close(self):
        """Detach it, with all that is on it."""
        subprocess.check_call(["umount", "-l", self.folder])

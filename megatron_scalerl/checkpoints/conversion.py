"""The parts that all conversions share: options, the folder for the result, and the copying of tensors.

The life of a result called NAME:

1. `result_folder` makes and locks the folder `.NAME.partial` beside NAME, and deletes files of a killed conversion.
2. `Copier` reads each tensor in blocks of rows, checks each block, and writes to a `new_file`, synced at the end.
3. With `Options.verify` the caller, `to_hf` or `to_megatron`, reads the files again and compares all tensors.
4. `publish_folder` syncs the folders and renames the result to NAME. `.NAME.partial` is deleted, also on failure.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_scalerl.checkpoints.assembly import Assembly, Sources, bands, has_nonfinite
from megatron_scalerl.checkpoints.atomic_io import lock_file, publish_folder
from megatron_scalerl.processes.logs import size
from megatron_scalerl.record import record

_RESERVE = 64 << 20
"""Free space (bytes) that a conversion must leave on the disk."""


@record
class Options:
    """Options of a conversion."""

    dtype: str | None = None
    """Type to write: F32, BF16 or F16; None keeps each tensor's type."""
    verify: bool = False
    """Whether to compare every tensor bit for bit before the result gets its name."""
    allow_nonfinite: bool = False
    """Whether NaN and Inf are accepted in the policy's weights."""
    console: Console | None = None
    """Console for the progress bar, which is shown on a terminal only."""


DEFAULTS = Options()


@record
class Summary:
    """The result of a conversion: number of tensors, bytes, and whether the written files were read again and
    compared."""

    tensors: int
    nbytes: int
    """Bytes of weights in the result."""
    verified: bool


@record
class Copier:
    """Reads, checks and writes tensors in blocks of rows; a tensor is never in memory as a whole."""

    sources: Sources
    options: Options
    on_bytes: Callable[[int], None]
    """Called after each write of a block of rows, with the number of bytes."""

    def checksum(self, assembly: Assembly) -> str:
        """The xxh3_64 of a tensor's assembled bytes. Raises ValueError for NaN or Inf, unless `allow_nonfinite` is
        set."""
        return self._checksum(assembly, True, lambda rows: None)

    def write(self, file: IO[bytes], assembly: Assembly, *, policy: bool = True) -> str:
        """Append a tensor to a file and return the checksum. Raises ValueError as `checksum` does.

        policy: False for a tensor outside the policy, which may contain NaN and Inf.
        """

        def append(rows: np.ndarray) -> None:
            file.write(rows.data)
            self.on_bytes(rows.nbytes)

        return self._checksum(assembly, policy, append)

    def rows(self, assembly: Assembly, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield rows `start` to `stop` of a tensor, band by band, for the caller to write."""
        for rows in bands(assembly, self.sources, start, stop):
            yield rows
            self.on_bytes(rows.nbytes)

    def _checksum(self, assembly: Assembly, policy: bool, use: Callable[[np.ndarray], None]) -> str:
        state = xxhash.xxh3_64()
        check = policy and not self.options.allow_nonfinite
        for rows in bands(assembly, self.sources):
            if check and has_nonfinite(rows, assembly.dtype):
                raise ValueError(f"{assembly.name}: the tensor has NaN or Inf; --allow-nonfinite accepts them")
            # `content` is a view of `rows`, so the checksum and the file have the bytes that were checked.
            content = rows.reshape(-1).view(np.uint8)
            state.update(content.data)
            use(content)
        return state.hexdigest()


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that opens a new file for writing and, at the end, syncs the file to the disk.

    Raises ValueError for a full disk, for a limit on the size of files, and for a disk that fails.
    """
    try:
        with path.open("wb", buffering=1 << 16) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            # The file leaves the page cache, so that `Options.verify` compares the bytes on the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise ValueError(f"{path.name}: it cannot be written: {error.strerror}") from None


@contextmanager
def progress(options: Options, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar of bytes, on a terminal only. Yields a function that advances the bar
    by a number of bytes."""
    console = options.console
    if console is None or not console.is_terminal:
        yield lambda nbytes: None
        return
    bytes_column = DownloadColumn(binary_units=True)
    columns = (TextColumn(title), BarColumn(bar_width=20), bytes_column, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def result_folder(out: Path, nbytes: int) -> Iterator[Path]:
    """Context manager that yields a temporary folder for a result of `nbytes`, and renames the folder to `out` at the
    end.

    Raises ValueError if `out` exists, another process converts to `out`, or the disk has too little space.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: this path exists already, and is not overwritten; choose another path")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: the folder {out.parent} does not exist; make it first")
    state = out.with_name(f".{out.name}.partial")
    state.mkdir(exist_ok=True)
    try:
        lock = lock_file(state / "lock")
    except BlockingIOError:
        raise ValueError(f"{out}: another conversion to this path is running") from None
    result = state / "result"
    try:
        if result.exists():
            shutil.rmtree(result)
        free = shutil.disk_usage(out.parent).free
        needed_bytes = nbytes + _RESERVE
        if needed_bytes > free:
            raise ValueError(f"{out}: the disk has {size(free)} free; the conversion needs {size(needed_bytes)}")
        result.mkdir()
        yield result
        publish_folder(result, out)
    finally:
        # The lock is held until the folder is deleted, so no second conversion uses the folder.
        shutil.rmtree(state)
        os.close(lock)

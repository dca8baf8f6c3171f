"""The store of weights: files from which an engine catches up while the trainer steps.

What a sender broadcasts in a shard's group it appends to a file, too: a whole update, the anchor, and after it the
updates of changes. Read from its beginning, the file is what an engine would have received in all of them.

    FOLDER/SENDER-SHARD-ANCHOR-GROUP     of the connection GROUP, from the whole update of version ANCHOR on
    FOLDER/SENDER-newest-ANCHOR-GROUP    newest version that all of the sender's files have, written last

A thread writes, so that an update does not wait for the files; the next one waits for what is not written yet. A
sender has two anchors only until the newer one is complete, and none where the store's bytes do not suffice. Whatever
fails here costs the store, never an update: engines are then caught up by the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_scalerl.distributed.rendezvous import FolderRendezvous, check_private
from megatron_scalerl.weights.plan import Connection
from megatron_scalerl.weights.transport.gloo import Finish, Group

logger = logging.getLogger(__name__)

_WORTH_A_LINE_S = 1.0
_LEAST_RESERVE, _MOST_RESERVE = 64 << 20, 1 << 30
"""Bytes of the file system that are left free: a tenth of it, within these."""
_HUNG: set[str] = set()
"""Folders in which a thread of this process hangs."""


class StoreWriter:
    """One sender's part of the store."""

    def __init__(self, connection: Connection, sender: int) -> None:
        self._folder, self._group, self._sender = Path(connection.store), connection.group, sender
        self._bytes_of_all, self._patience_s = connection.store_bytes, connection.timeout_s / 2
        self._anchor, self._bytes, self._limit = "", 0, 0  # of what is being recorded; "" if nothing is
        self._open: dict[int, BinaryIO] = {}
        self._before: list[Path] = []  # files that the anchor replaces
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._failed = self._closed = False
        self._thread = threading.Thread(target=self._work, name="weight store", daemon=True)
        self._thread.start()

    def begin(self, version: int, *, whole: bool, nbytes: int, share: float) -> None:
        """Before an update; returns once those before it are written.

        nbytes: that this sender adds to its files in a whole update; share: of what all senders add.
        """
        self._settle()
        if not whole or self._failed:
            return
        limit = int(self._bytes_of_all * share)
        self._anchor, self._bytes, self._limit = "", 0, limit
        if nbytes > limit:
            why = f"weights.store_gib: expected at least {nbytes} bytes for this sender, found {limit}"
            self._later(lambda: self._give_up(why))
            return
        anchor = self._anchor = f"{version}-{self._group}"
        self._later(lambda: self._make_room(anchor, nbytes, limit))

    def add(self, shard: int, tensor: torch.Tensor) -> None:
        """Append what is broadcast in a shard's group. It must stay as it is until the next `begin`."""
        if not self._anchor or self._failed:
            return
        self._bytes += tensor.nbytes
        if self._bytes > self._limit:
            logger.info("weights.store_gib: no room for the updates since the last whole one; off until the next one")
            self._anchor = ""
            self._later(self._delete_all)
            return
        try:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        except RuntimeError as error:  # no host memory for a GPU's
            self._anchor, why = "", str(error)
            self._later(lambda: self._give_up(why))
            return
        path = self._folder / f"{self._sender}-{shard}-{self._anchor}"
        self._later(lambda: self._append(shard, path, data))

    def end(self, version: int) -> None:
        """After an update that all receivers have."""
        if self._anchor and not self._failed:
            anchor = self._anchor
            self._later(lambda: self._complete(anchor, version))

    def close(self) -> None:
        """Write nothing more; the files stay. Returns at once."""
        self._failed = self._closed = True
        self._forget()
        self._jobs.put(None)

    def _forget(self) -> None:
        """Drop what is not written yet, and with it the memory that it keeps."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def _later(self, job: Callable[[], None]) -> None:
        def unless_failed() -> None:
            if not self._failed:
                job()

        self._jobs.put(unless_failed)

    def _settle(self) -> None:
        """Wait for the thread, which a file system may hold, for half of what receivers wait for the next update."""
        if self._failed:
            return
        written, begin = threading.Event(), time.monotonic()
        self._jobs.put(written.set)
        if not written.wait(self._patience_s):
            self._failed = True  # nothing is completed any more, whatever the thread writes
            self._forget()
            _HUNG.add(str(self._folder))
            logger.warning("weights.store: %s: not written within %g s: off", self._folder, self._patience_s)
        elif (waited := time.monotonic() - begin) > _WORTH_A_LINE_S:
            logger.warning("weights.store: %s: an update waited %.1f s for the one before", self._folder, waited)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except (OSError, RuntimeError) as error:
                self._give_up(str(error))
        self._close_files()

    def _make_room(self, anchor: str, nbytes: int, limit: int) -> None:
        """Before an anchor: what is there goes at once where there is no room for both, else once it is complete."""
        self._before = self._files()
        kept = sum(path.stat().st_size for path in self._before)
        no_room = kept + nbytes > limit or _free(self._folder) < nbytes
        if no_room or any(path.name.endswith(f"-{anchor}") for path in self._before):
            self._delete_all()

    def _append(self, shard: int, path: Path, data: Any) -> None:
        if shard not in self._open:
            check_private(str(self._folder))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._open[shard] = open(os.open(path, flags, 0o600), "ab")  # noqa: SIM115
        if (free := _free(self._folder)) < data.nbytes:
            raise OSError(f"expected {data.nbytes} bytes of room and a reserve for others, found {free}")
        self._open[shard].write(data)

    def _complete(self, anchor: str, version: int) -> None:
        opened, self._open = self._open, {}
        for file in opened.values():
            file.close()  # what another host opens from now on has all of it
        draft = self._folder / f"{self._sender}-draft-{anchor}"
        draft.touch(0o600)
        draft.write_text(str(version))
        os.replace(draft, self._folder / f"{self._sender}-newest-{anchor}")
        before, self._before = self._before, []
        for path in before:
            path.unlink(missing_ok=True)

    def _close_files(self) -> None:
        opened, self._open = self._open, {}
        for file in opened.values():
            with contextlib.suppress(OSError):  # what was not written is missing, which a reader notices
                file.close()

    def _delete_all(self) -> None:
        self._close_files()
        for path in self._files():
            path.unlink(missing_ok=True)

    def _give_up(self, why: str) -> None:
        """Nothing is stored by this sender any more, over this connection. Closed: the files may be another's."""
        if self._closed:
            self._close_files()
            return
        logger.warning("weights.store: %s: off until engines join or leave: %s", self._folder, why)
        with contextlib.suppress(OSError):
            self._delete_all()
        self._failed = True  # after the files: who finds it set waits for this thread no more

    def _files(self) -> list[Path]:
        """All of this sender, those first without which nobody begins to read."""
        return sorted(self._folder.glob(f"{self._sender}-*"), key=lambda path: "-newest-" not in path.name)


def make_writer(connection: Connection, sender: int) -> StoreWriter | None:
    """The writer of a connection with a store; None without one, and for a folder that hung in this process."""
    return StoreWriter(connection, sender) if connection.store and connection.store not in _HUNG else None


def _free(folder: Path) -> int:
    """Bytes that may be written: /dev/shm has other processes' memory, too, which are killed where it is full."""
    found = os.statvfs(folder)
    reserve = max(_LEAST_RESERVE, min(found.f_blocks * found.f_frsize // 10, _MOST_RESERVE))
    return found.f_bavail * found.f_frsize - reserve


def stored_anchor(folder: str, group: str, senders: int, version: int) -> int | None:
    """The version from which the store's files lead to `version`, once all senders have written it; else None."""
    anchors = set()
    for sender in range(senders):
        found = [path for path in Path(folder).glob(f"{sender}-newest-*-{group}") if _number_in(path) == version]
        if len(found) != 1:
            return None
        anchors.add(int(found[0].name.split("-")[2]))
    return anchors.pop() if len(anchors) == 1 else None


def is_stored(folder: str, group: str, senders: int) -> bool:
    """Whether all senders have files of this connection, complete or not."""
    return all(any(Path(folder).glob(f"{sender}-*-*-{group}")) for sender in range(senders))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # it was deleted meanwhile
        return None


class StoredGroup(Group):
    """A receiver's group whose broadcasts come from the store's file, one after another."""

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0) -> None:
        """connection.group: ANCHOR-GROUP. What is received is on `device`, which may be set to a GPU.

        Raises RuntimeError for a file that is not there, and for a folder that another user can access.
        """
        assert isinstance(connection.rendezvous, FolderRendezvous)
        self.bucket_mib = connection.bucket_mib
        folder = connection.rendezvous.folder
        self._path = f"{folder}/{sender}-{shard}-{connection.group}"
        try:
            check_private(folder)
            self._file: BinaryIO | None = open(self._path, "rb")  # noqa: SIM115
        except OSError as error:
            raise RuntimeError(f"weights.store: {error}") from error

    def start(self, tensor: torch.Tensor) -> Finish:
        """Read the next broadcast. Raises RuntimeError where the file ends."""
        if self._file is None:
            raise RuntimeError("the store of weights is closed")
        on_host = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        try:
            found = self._file.readinto(on_host.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        except OSError as error:
            raise RuntimeError(f"weights.store: {error}") from error
        if found != tensor.nbytes:
            raise RuntimeError(f"weights.store: {self._path}: expected {tensor.nbytes} more bytes, found {found}")
        if on_host is not tensor:
            tensor.copy_(on_host)
        return lambda: None

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

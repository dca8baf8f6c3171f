"""The broadcast group in shared memory, for processes of one host: the framing of `transport.frames`.

Rank 0 makes SLOTS pieces of anonymous memory, and each member maps them: a tensor is copied in once and copied out by
every receiver. Who may write, and who may read, goes over one Unix socket to each receiver:

    rank 0 ── the memory's file descriptor, once ──► receiver
           ── number of the piece, bytes in it ────►
           ◄─ one byte: it was copied out ──────────        (rank 0 is at most SLOTS pieces ahead of the slowest)

The socket is in the run's private folder, which no other user can enter, and both ends compare the other's user id
with their own: unlike gloo's ports, another user of the host cannot take a member's place. A member that ends or
closes is noticed by the others at once.
"""

import contextlib
import hashlib
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

import torch

from megatron_scalerl.distributed.rendezvous import FolderRendezvous, check_private
from megatron_scalerl.weights.plan import Connection
from megatron_scalerl.weights.transport.gloo import Finish, Group

SLOTS = 2
_PIECE = struct.Struct("<QQ")  # number, bytes
_LAYOUT = struct.Struct("<QQ")  # slots, bytes of each
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_RETRY_S = 0.01
_MARGIN = 4096
"""Bytes of a slot beyond bucket_mib: a bucket's digest, and the rounding of its parts."""


class ShmGroup(Group):
    """A broadcast group of processes on one host."""

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0):
        """Join the group of a sender and a shard; returns when all members have.

        Raises RuntimeError after connect_timeout_s, and for processes on several hosts.
        """
        if not isinstance(connection.rendezvous, FolderRendezvous):
            raise RuntimeError("weights.transport: shm: expected all processes on one host, found several hosts")
        check_private(connection.rendezvous.folder)
        self.bucket_mib, self._timeout = connection.bucket_mib, connection.timeout_s
        self._sockets: list[socket.socket] = []
        self._slots: list[torch.Tensor] = []
        self._leads, self._number = rank == 0, 0  # of the next piece
        self._copied_out = [0] * (connection.world_sizes[shard] - 1)  # pieces, by each receiver
        self._receiving: deque[torch.Tensor] = deque()
        end = time.monotonic() + connection.connect_timeout_s
        name = hashlib.sha256(f"{connection.group}-{sender}-{shard}".encode()).hexdigest()[:16]
        try:
            with _failing_as("the weight group was not formed"), _short(connection.rendezvous.folder) as folder:
                if rank == 0:
                    self._lead(f"{folder}/{name}", end)
                else:
                    self._follow(f"{folder}/{name}", end)
        except BaseException:
            self.close()
            raise
        self._open = True

    def _lead(self, path: str, end: float) -> None:
        size = (self.bucket_mib << 20) + _MARGIN
        memory = os.memfd_create("msrl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, SLOTS * size)
            self._map(memory, SLOTS, size)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                try:
                    listening.listen()
                    while len(self._sockets) < len(self._copied_out):
                        listening.settimeout(max(end - time.monotonic(), _RETRY_S))
                        member, _ = listening.accept()
                        self._sockets.append(member)
                        self._check(member)
                        socket.send_fds(member, [_LAYOUT.pack(SLOTS, size)], [memory])
                finally:
                    os.unlink(path)
        finally:
            os.close(memory)

    def _follow(self, path: str, end: float) -> None:
        while True:
            member = socket.socket(socket.AF_UNIX)
            try:
                member.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                member.close()
                if time.monotonic() > end:
                    raise
                time.sleep(_RETRY_S)
        self._sockets.append(member)
        self._check(member)
        member.settimeout(max(end - time.monotonic(), _RETRY_S))
        layout, memory, *_ = socket.recv_fds(member, _LAYOUT.size, 1)
        try:
            if not memory or len(layout) < _LAYOUT.size:
                raise ConnectionError("the sender left")
            self._map(memory[0], *_LAYOUT.unpack(layout))
        finally:
            for each in memory:
                os.close(each)
        member.settimeout(self._timeout)

    def _check(self, member: socket.socket) -> None:
        """Raise OSError for a process of another user."""
        member.settimeout(self._timeout)
        found = member.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(found)
        if user != os.geteuid():
            raise PermissionError(f"expected a process of user {os.geteuid()}, found one of user {user}")

    def _map(self, memory: int, slots: int, size: int) -> None:
        whole = torch.frombuffer(mmap.mmap(memory, slots * size), dtype=torch.uint8)
        self._slots = list(whole.split(size))

    def start(self, tensor: torch.Tensor) -> Finish:
        """Broadcast rank 0's tensor, of any contiguous kind. Both raise RuntimeError.

        Rank 0 has copied it when this returns; all receivers have it when what it returns has returned.
        """
        if not self._open:
            raise RuntimeError("the group of the weight update is closed")
        data = tensor.view(-1).view(torch.uint8)
        if self._leads:
            with _failing_as("a receiver of the weight group left or did not answer"):
                self._send(data)
            pieces = self._number
        else:
            self._receiving.append(data)

        def finish() -> None:
            if not self._open:
                raise RuntimeError("the group of the weight update is closed")
            if self._leads:
                with _failing_as("a receiver of the weight group left or did not answer"):
                    self._wait_for(pieces)
                return
            with _failing_as("the sender of the weight group left or did not answer"):
                while any(waiting is data for waiting in self._receiving):
                    self._receive(self._receiving[0])
                    self._receiving.popleft()

        return finish

    def _wait_for(self, pieces: int) -> None:
        """Wait until all receivers have copied out this many."""
        for member, connection in enumerate(self._sockets):
            while self._copied_out[member] < pieces:
                self._copied_out[member] += len(_received(connection, 1))

    def _send(self, data: torch.Tensor) -> None:
        for piece in data.split(len(self._slots[0])):
            self._wait_for(self._number + 1 - SLOTS)
            self._slots[self._number % SLOTS][: len(piece)].copy_(piece)
            for connection in self._sockets:
                connection.sendall(_PIECE.pack(self._number, len(piece)))
            self._number += 1

    def _receive(self, data: torch.Tensor) -> None:
        [connection] = self._sockets
        for piece in data.split(len(self._slots[0])):
            found = _PIECE.unpack(_received(connection, _PIECE.size))
            if found != (self._number, len(piece)):
                raise ConnectionError(f"expected piece {self._number} of {len(piece)} bytes, found {found}")
            piece.copy_(self._slots[self._number % len(self._slots)][: len(piece)])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a sender that has left needs none
                connection.sendall(b"\0")
            self._number += 1

    def close(self) -> None:
        """Leave the group; the other members notice at once."""
        self._open = False
        for connection in self._sockets:
            connection.close()
        self._sockets, self._slots = [], []
        self._receiving.clear()


def _received(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises OSError."""
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionError("the connection was closed")
        found += more
    return found


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Another path of a folder: a socket's has at most 107 characters."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turn an OSError into a RuntimeError with what failed."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{what}: {error or type(error).__name__}") from error

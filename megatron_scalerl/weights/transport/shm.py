"""The broadcast group in shared memory, for processes of one host: the framing of `transport.frames`.

Rank 0 makes BUFFERS buffers of anonymous memory, and each member maps the buffers. A tensor is cut into chunks of a
buffer's size. Life of a chunk: rank 0 copies the chunk into the next buffer, and every receiver copies the chunk out.
One Unix socket to each receiver passes the turn:

    rank 0 ── the memory's file descriptor, once ──► receiver
           ── number of the chunk, its bytes ──────►
           ◄─ one byte: chunk copied out ───────────        (rank 0 is at most BUFFERS chunks ahead of the slowest)

The socket is in the run's private folder, which no other user can enter, and each end checks that the peer has the
same user id. Another user of the host can take a member's place in a group of gloo, and not here. All members notice
at once when a member ends or closes.
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

BUFFERS = 2
"""Number of buffers in shared memory: rank 0 fills one buffer while receivers empty the other."""
_CHUNK = struct.Struct("<QQ")
"""Layout of the message that announces a chunk: the chunk's number and bytes."""
_LAYOUT = struct.Struct("<QQ")
"""Layout of the first message: number of buffers, and bytes of each buffer."""
_CREDENTIALS = struct.Struct("3i")
"""Layout of a socket's credentials: process, user and group of the other end."""
_RETRY_S = 0.01
"""Pause before a receiver looks for the sender's socket again (seconds)."""
_MARGIN = 4096
"""Bytes of a buffer beyond bucket_mib, for a bucket's digest and the slots' padding."""


class ShmGroup(Group):
    """A broadcast group of processes on one host."""

    def __init__(self, connection: Connection, rank: int, sender: int = 0, shard: int = 0):
        """Join the group of a sender and a shard, and return when all members have joined.

        Raises RuntimeError if a member has not joined after connect_timeout_s, and for processes on several hosts.
        """
        if not isinstance(connection.rendezvous, FolderRendezvous):
            raise RuntimeError(
                "weights.transport: shm needs all processes on one host, and the run has several; set it to auto"
            )
        check_private(connection.rendezvous.folder)
        self.bucket_mib = connection.bucket_mib
        self._timeout = connection.timeout_s
        self._sockets: list[socket.socket] = []
        self._buffers: list[torch.Tensor] = []
        self._leads = rank == 0
        self._next = 0
        """Number of the chunk that this member sends or receives next."""
        self._copied_out = [0] * (connection.world_sizes[shard] - 1)
        """[receivers] number of chunks that each receiver has copied out so far."""
        self._receiving: deque[torch.Tensor] = deque()
        """Tensors that this receiver still has to copy out, in the order of the broadcasts."""
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
        self._is_open = True

    def _lead(self, path: str, end: float) -> None:
        size = (self.bucket_mib << 20) + _MARGIN
        # Memory without a file name is freed with the last process that maps it, so a killed run leaves nothing
        # behind.
        memory = os.memfd_create("msrl-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, BUFFERS * size)
            self._map(memory, BUFFERS, size)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path)
                try:
                    listening.listen()
                    while len(self._sockets) < len(self._copied_out):
                        listening.settimeout(max(end - time.monotonic(), _RETRY_S))
                        member, _ = listening.accept()
                        self._sockets.append(member)
                        self._check(member)
                        socket.send_fds(member, [_LAYOUT.pack(BUFFERS, size)], [memory])
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
                # The sender does not listen yet, so the receiver tries again.
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
            for descriptor in memory:
                os.close(descriptor)
        member.settimeout(self._timeout)

    def _check(self, member: socket.socket) -> None:
        """Check the process at the socket's other end. Raises OSError for a process of another user."""
        member.settimeout(self._timeout)
        credentials = member.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            raise PermissionError(f"the peer process runs as user {user}, not as user {os.geteuid()}")

    def _map(self, memory: int, buffers: int, size: int) -> None:
        all_bytes = torch.frombuffer(mmap.mmap(memory, buffers * size), dtype=torch.uint8)
        self._buffers = list(all_bytes.split(size))

    def start(self, tensor: torch.Tensor) -> Finish:
        """Broadcast rank 0's tensor, which may have any type and must be contiguous.

        When `start` returns, rank 0 has copied the tensor. When the returned function returns, all receivers have
        copied the tensor out. Both raise RuntimeError if the group is closed, or if a member leaves or does not
        answer.
        """
        if not self._is_open:
            raise RuntimeError("the group of the weight update is closed")
        data = tensor.view(-1).view(torch.uint8)
        if self._leads:
            with _failing_as("an engine's worker left or did not answer; see the engines' logs"):
                self._send(data)
            chunks = self._next
        else:
            self._receiving.append(data)

        def finish() -> None:
            if not self._is_open:
                raise RuntimeError("the group of the weight update is closed")
            if self._leads:
                with _failing_as("an engine's worker left or did not answer; see the engines' logs"):
                    self._wait_for(chunks)
                return
            with _failing_as("the sender of the weight group left or did not answer"):
                # Chunks arrive in the order of the broadcasts: earlier tensors are copied out first.
                while any(waiting is data for waiting in self._receiving):
                    self._receive(self._receiving[0])
                    self._receiving.popleft()

        return finish

    def _wait_for(self, chunks: int) -> None:
        """Wait until all receivers have copied out this many chunks."""
        for member, connection in enumerate(self._sockets):
            while self._copied_out[member] < chunks:
                self._copied_out[member] += len(_received(connection, 1))

    def _send(self, data: torch.Tensor) -> None:
        for chunk in data.split(len(self._buffers[0])):
            # The buffer for this chunk is free once all receivers have copied out the chunk BUFFERS before this one.
            self._wait_for(self._next + 1 - BUFFERS)
            self._buffers[self._next % BUFFERS][: len(chunk)].copy_(chunk)
            for connection in self._sockets:
                connection.sendall(_CHUNK.pack(self._next, len(chunk)))
            self._next += 1

    def _receive(self, data: torch.Tensor) -> None:
        [connection] = self._sockets
        for chunk in data.split(len(self._buffers[0])):
            number, size = _CHUNK.unpack(_received(connection, _CHUNK.size))
            if (number, size) != (self._next, len(chunk)):
                raise ConnectionError(
                    f"chunk {number} of {size} bytes arrived instead of chunk {self._next} of {len(chunk)} bytes"
                )
            chunk.copy_(self._buffers[number % len(self._buffers)][:size])
            # A sender that has left needs no answer, so a broken connection is no failure here.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"\0")
            self._next += 1

    def close(self) -> None:
        """Leave the group; the other members notice at once."""
        self._is_open = False
        for connection in self._sockets:
            connection.close()
        self._sockets = []
        self._buffers = []
        self._receiving.clear()


def _received(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises OSError if the peer closes the connection or sends nothing in time."""
    data = b""
    while len(data) < count:
        received_bytes = connection.recv(count - len(data))
        if not received_bytes:
            raise ConnectionError("the peer process closed the connection")
        data += received_bytes
    return data


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Context with a short path for a folder, because a socket's path has at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failing_as(failure: str) -> Iterator[None]:
    """Context in which an OSError becomes a RuntimeError whose message begins with `failure`."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{failure}: {error or type(error).__name__}") from error

"""Where the processes of a run meet: the stores in which they tell each other the addresses of their sockets.

    one host       FolderRendezvous   files in a folder that only this user can enter
    several hosts  HostRendezvous     one TCPStore, bound by the trainer's rank 0 to one of its own addresses

The trainer's ranks meet under the name "trainer", every weight group under a name of its own.

A store has no authentication: whoever reaches it lists, reads and overwrites its keys. A secret is therefore never
a key or a value, and nothing that stands in a store is believed further than to open a connection. On one host
the folder's mode keeps other users out; even a port on loopback would admit every local user. A HostRendezvous
needs a network that is closed to strangers, and not for the store alone: the sockets that gloo and NCCL open to
carry tensors know no secret either, and Megatron-Core's object collectives unpickle what a peer sends.

gloo listens on one port per process group, at the address that this module chooses (loopback on one host). A
connection there has to name the number of a pair that is waiting, which can be guessed, and nothing else: a local
user who is faster than the real peer while a group is being formed can take its place. Afterwards a
connection changes nothing. torch's wheels build gloo without TLS. So gloo, which serves machines without GPUs,
belongs on a host whose users are all trusted. See docs/security.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "lo"
"""Linux's name of the interface that leads nowhere but to the same host."""
_ANY_ADDRESS = ("", "0.0.0.0", "::")


class FolderRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Processes of one host meet in files. Produced by `private_folder`; nobody binds anything."""

    folder: str
    """Absolute path; owned by this user, mode 0700, fresh for every start of a run."""


class HostRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Processes of several hosts meet at a TCPStore that the trainer's rank 0 binds. Produced by `address_of`."""

    host: str
    """An address of the one interface of rank 0 that the store is bound to."""
    port: int
    """Chosen by the kernel."""


Rendezvous = FolderRendezvous | HostRendezvous


@contextlib.contextmanager
def private_folder() -> Iterator[FolderRendezvous]:
    """A fresh folder for one start of a run; it is gone when the block is left. What a kill leaves is not used again.

    It lies in the temporary directory (TMPDIR), because not every network file system has the file locks that the
    stores need, and is held locked, which keeps systemd-tmpfiles from clearing it away under a long run.
    """
    folder = tempfile.mkdtemp(prefix="megatron_scalerl-")  # mode 0700, and no name that was there before
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        yield FolderRendezvous(folder=folder)
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


def listen_on(host: str) -> socket.socket:
    """A listening socket on one address of this host, at a port that the kernel chooses.

    Raises ValueError for an address that means every interface, OSError for one that is not this host's.
    """
    if host in _ANY_ADDRESS:
        raise ValueError(f"rendezvous: expected the address of one interface, found {host!r} (all of them)")
    [(family, kind, *_, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    listening = socket.socket(family, kind)
    try:
        listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def address_of(listening: socket.socket) -> HostRendezvous:
    """Where others find the store that `serve_store` makes of this socket."""
    host, port = listening.getsockname()[:2]
    return HostRendezvous(host=host, port=port)


def serve_store(listening: socket.socket) -> dist.TCPStore:
    """The store behind a HostRendezvous, on a socket of `listen_on`; it lives as long as the object."""
    import torch.distributed as dist

    address = address_of(listening)
    return dist.TCPStore(
        address.host, address.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def open_store(rendezvous: Rendezvous, name: str, *, timeout: timedelta) -> dist.Store:
    """The store of one group. Its waits end after `timeout`.

    Raises RuntimeError for a folder that another user owns or can enter, and for a host that does not answer.
    """
    import torch.distributed as dist

    if isinstance(rendezvous, FolderRendezvous):
        _check_private(rendezvous.folder)
        store: dist.Store = dist.FileStore(str(Path(rendezvous.folder) / name))
        store.set_timeout(timeout)
        return store
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(name, store)


def use_interface(rendezvous: Rendezvous | None) -> None:
    """Have this process's default collectives listen where its peers are, and nowhere else; None: it has none.

    Call it before the first group is made.
    """
    os.environ |= listen_only_at(LOOPBACK if rendezvous is None else interface_of(rendezvous))


def listen_only_at(interface: str) -> dict[str, str]:
    """Environment of a process whose gloo and NCCL open ports at one interface only."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def gloo_device(rendezvous: Rendezvous) -> Any:
    """The device of a gloo group that listens where its peers are, and nowhere else."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo.create_device(interface=interface_of(rendezvous))


def interface_of(rendezvous: Rendezvous) -> str:
    """Name of this host's interface that leads to the other processes. Raises RuntimeError if there is none."""
    if isinstance(rendezvous, FolderRendezvous):
        return LOOPBACK
    import psutil

    [(family, kind, *_, address), *_] = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:  # sends nothing: connecting a datagram socket only looks up the route
        probe.connect(address)
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return name
    raise RuntimeError(f"rendezvous: expected an interface with the address {own}, which leads to {rendezvous.host}")


def _check_private(folder: str) -> None:
    found = os.lstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise RuntimeError(
            f"rendezvous: {folder}: expected a folder of user {os.geteuid()} with mode 0700, found one of user "
            f"{found.st_uid} with mode {mode:04o}"
        )

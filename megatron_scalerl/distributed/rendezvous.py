"""Rendezvous of a run's processes: the stores through which processes exchange the addresses of sockets.

    one host       FolderRendezvous   files in a folder that only this user can enter
    several hosts  HostRendezvous     a TCPStore, bound by the trainer's rank 0 to an address of rank 0's host

The trainer's ranks use the name "trainer", and every weight group has another name.

A store has no authentication: any process that reaches the store can list, read and overwrite keys. A secret is
therefore never a key or a value, and the store's contents are trusted only to open a connection. On one host the
folder's mode excludes other users; a port on loopback would admit every local user. A HostRendezvous requires a
private network, and not for the store only: the sockets of gloo and NCCL for tensors have no authentication either,
and Megatron-Core's object collectives unpickle data from peers.

gloo listens on one port per process group, at the address that this module selects (loopback on one host). A
connection must only name the number of a waiting pair, which can be guessed: a local user who connects before the
real peer while a group is formed can take the peer's place. Later connections have no effect. torch's wheels build
gloo without TLS. So gloo, which is for machines without GPUs, requires a host with trusted users only. See
docs/security.md.
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
"""Name of the loopback interface on Linux."""
_ANY_PORT = 9
"""Port that stands for any port when a route is looked up; nothing is sent."""
_ANY_ADDRESS = ("", "0.0.0.0", "::")
"""Wildcard addresses. A socket that is bound to a wildcard listens on all interfaces."""


class FolderRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The processes of one host meet in files, so no port is bound. Produced by `private_folder`."""

    folder: str
    """Absolute path of the folder, which is owned by this user, has mode 0700 and is new for every start of a run."""


class HostRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The processes of several hosts meet at a TCPStore of the trainer's rank 0. Produced by `address_of`."""

    host: str
    """Address of rank 0's interface to which the store is bound."""
    port: int
    """Port of the store, chosen by the kernel."""


Rendezvous = FolderRendezvous | HostRendezvous


@contextlib.contextmanager
def private_folder() -> Iterator[FolderRendezvous]:
    """A block with a new folder for one start of a run. The folder is deleted at the end of the block, but not by a
    kill.

    The folder is in the temporary directory (TMPDIR), because not every network file system has the file locks that
    the stores need. A lock keeps systemd-tmpfiles from deleting the folder during a long run.
    """
    folder = tempfile.mkdtemp(prefix="megatron_scalerl-")  # the folder has mode 0700 and a new name
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield FolderRendezvous(folder=folder)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def listen_on(host: str) -> socket.socket:
    """A listening socket on one address of this host, at a port that the kernel chooses.

    Raises ValueError for a wildcard address, OSError for an address of another host.
    """
    if host in _ANY_ADDRESS:
        raise ValueError(f"rendezvous: {host!r} stands for all interfaces; give the address of a single interface")
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
    """The address at which `serve_store` serves a store on this socket."""
    host, port = listening.getsockname()[:2]
    return HostRendezvous(host=host, port=port)


def serve_store(listening: socket.socket) -> dist.TCPStore:
    """Serve the store of a HostRendezvous on a socket of `listen_on`, for as long as the returned object exists."""
    import torch.distributed as dist

    address = address_of(listening)
    return dist.TCPStore(
        address.host, address.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def open_store(rendezvous: Rendezvous, name: str, *, timeout: timedelta) -> dist.Store:
    """Open the store of one group. Operations that wait time out after `timeout`.

    Raises RuntimeError for a folder that another user owns or can access, and for a host that does not answer.
    """
    import torch.distributed as dist

    if isinstance(rendezvous, FolderRendezvous):
        check_private(rendezvous.folder)
        store: dist.Store = dist.FileStore(str(Path(rendezvous.folder) / name))
        store.set_timeout(timeout)
        return store
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(name, store)


def use_interface(rendezvous: Rendezvous | None) -> None:
    """Make this process's default collectives listen only on the interface to the peers. None: there are no peers.

    Between hosts, a NCCL_SOCKET_IFNAME that the user has set stays. Call before the first group is created.
    """
    variables = listen_only_at(LOOPBACK if rendezvous is None else interface_of(rendezvous))
    if isinstance(rendezvous, HostRendezvous) and "NCCL_SOCKET_IFNAME" in os.environ:
        del variables["NCCL_SOCKET_IFNAME"]
    os.environ |= variables


def listen_only_at(interface: str) -> dict[str, str]:
    """Environment variables with which gloo and NCCL open ports on this interface only."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def gloo_device(rendezvous: Rendezvous) -> Any:
    """The device with which a gloo group listens only on the interface to the peers."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo.create_device(interface=interface_of(rendezvous))


def interface_of(rendezvous: Rendezvous) -> str:
    """Name of the interface through which this host reaches the other processes.

    Raises RuntimeError if there is none.
    """
    if isinstance(rendezvous, FolderRendezvous):
        return LOOPBACK
    import psutil

    address = local_address(rendezvous.host)
    for name, entries in psutil.net_if_addrs().items():
        # The address of an IPv6 entry ends with %INTERFACE.
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    raise RuntimeError(f"rendezvous: {address}, the address on the route to {rendezvous.host}, is on no interface")


def local_address(host: str) -> str:
    """This host's address on the route to `host`. Raises OSError for a name that cannot be resolved or reached."""
    [(family, kind, *_, address), *_] = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    # Connecting a datagram socket only looks up the route, and sends nothing.
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def check_private(folder: str) -> None:
    """Raise RuntimeError for a folder that another user owns or can access."""
    status = os.lstat(folder)  # not stat, since another user may have made a link
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise RuntimeError(
            f"rendezvous: {folder} belongs to user {status.st_uid} and has mode {mode:04o}; "
            f"it has to be a folder of user {os.geteuid()} with mode 0700"
        )

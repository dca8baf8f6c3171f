"""Rendezvous of a run's processes: the stores through which processes exchange the addresses of sockets.

    one host       FolderRendezvous   a FileStore in a folder that only this user can enter
    several hosts  HostRendezvous     a TCPStore, bound by the trainer's rank 0 to an address of rank 0's host

Each group of processes has a store with a name: "trainer" for the trainer's ranks, a new name for each group of a
weight update.

A store has no authentication: any process that reaches the store can list, read and overwrite keys. A secret is
therefore never a key or a value, and processes use the store's contents only to open connections. On one host the
folder's mode excludes other users, whereas a port on the loopback interface would admit every local user. With a
HostRendezvous the user must provide a private network. The store is not the only reason: the sockets of gloo and NCCL
for tensors have no authentication either, and Megatron-Core's object collectives unpickle data from peers.

gloo listens on one port per process group, at the address that this module selects (loopback on one host). gloo
accepts any connection that names the number of a waiting pair of ranks, and the number can be guessed. So while a
group is formed, a local user who connects first can take a rank's place; later connections have no effect. gloo in
torch's wheels has no TLS. So gloo, which is for machines without GPUs, requires a host on which all users are
trusted. See docs/security.md.
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
"""Port for looking up a route. No packet is sent, so the number has no effect."""
_ANY_ADDRESS = ("", "0.0.0.0", "::")
"""Wildcard addresses. A socket that is bound to a wildcard listens on all interfaces."""


class FolderRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A rendezvous for processes of one host, through files instead of a port. Produced by `private_folder`."""

    folder: str
    """Absolute path of a folder of this user with mode 0700; each start of a run makes a new folder."""


class HostRendezvous(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A rendezvous for processes of several hosts: the TCPStore of the trainer's rank 0. Produced by `address_of`."""

    host: str
    """Address of rank 0's host at which the store listens."""
    port: int
    """Port of the store, chosen by the kernel."""


Rendezvous = FolderRendezvous | HostRendezvous


@contextlib.contextmanager
def private_folder() -> Iterator[FolderRendezvous]:
    """Make a new folder for the block. The folder is deleted after the block, unless the process is killed.

    The folder is in the temporary directory (TMPDIR), because not every network file system has the file locks that
    the stores need. A lock keeps systemd-tmpfiles from deleting the folder during a long run.
    """
    folder = tempfile.mkdtemp(prefix="megatron_scalerl-")  # mkdtemp makes a folder with mode 0700
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield FolderRendezvous(folder=folder)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def listen_on(host: str) -> socket.socket:
    """A listening socket on one address of this host, at a port that the kernel chooses.

    Raises ValueError for a wildcard address, and OSError for an address that is not one of this host.
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
    """The rendezvous of the store that `serve_store` serves on this socket."""
    host, port = listening.getsockname()[:2]
    return HostRendezvous(host=host, port=port)


def serve_store(listening: socket.socket) -> dist.TCPStore:
    """Serve a TCPStore on a socket from `listen_on`. The store is served until the returned object is freed."""
    import torch.distributed as dist

    address = address_of(listening)
    return dist.TCPStore(
        address.host, address.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def open_store(rendezvous: Rendezvous, name: str, *, timeout: timedelta) -> dist.Store:
    """Open the store of the group `name`. timeout: time limit of each operation of the store that waits.

    Raises RuntimeError if another user owns or can access the folder, or if the host of the store does not answer.
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
    """Make gloo and NCCL in this process listen only on the interface to the peers; with None, only on loopback.

    Must be called before the first process group is created. Sets environment variables; with several hosts, keeps a
    NCCL_SOCKET_IFNAME that the user has set.
    """
    variables = listen_only_at(LOOPBACK if rendezvous is None else interface_of(rendezvous))
    if isinstance(rendezvous, HostRendezvous) and "NCCL_SOCKET_IFNAME" in os.environ:
        del variables["NCCL_SOCKET_IFNAME"]
    os.environ |= variables


def listen_only_at(interface: str) -> dict[str, str]:
    """Environment variables that make gloo and NCCL open ports only on this network interface."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def gloo_device(rendezvous: Rendezvous) -> Any:
    """A gloo device for a process group that listens only on the interface to the peers."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo.create_device(interface=interface_of(rendezvous))


def interface_of(rendezvous: Rendezvous) -> str:
    """Name of the network interface through which this host reaches the processes of the rendezvous.

    Raises RuntimeError if no interface has this host's address on the route.
    """
    if isinstance(rendezvous, FolderRendezvous):
        return LOOPBACK
    import psutil

    address = local_address(rendezvous.host)
    for name, entries in psutil.net_if_addrs().items():
        # psutil may append %INTERFACE to an IPv6 address.
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    raise RuntimeError(f"rendezvous: {address}, by which this host reaches {rendezvous.host}, is on no interface")


def local_address(host: str) -> str:
    """This host's address on the route to `host`. Raises OSError if `host` cannot be resolved or has no route."""
    [(family, kind, *_, address), *_] = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    # `connect` of a datagram socket looks up the route and sends nothing.
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def check_private(folder: str) -> None:
    """Raise RuntimeError if `folder` is no folder, or if another user owns or can access the folder."""
    status = os.lstat(folder)  # lstat, since the path may be a link that another user made
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise RuntimeError(
            f"rendezvous: {folder} belongs to user {status.st_uid} and has mode {mode:04o}; "
            f"it has to be a folder of user {os.geteuid()} with mode 0700"
        )

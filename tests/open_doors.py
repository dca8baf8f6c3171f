"""Which TCP ports the processes of a run listen on, and which of them a stranger on the host could use as a store."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from dataclasses import dataclass

import psutil

_STRANGER = """
import json, os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist

found = {}

def listen_in(host, port):
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        found[port] = [str(key) for key in store.list_keys()]
    except RuntimeError:
        pass

doors = json.loads(sys.argv[1])
for door in doors:
    threading.Thread(target=listen_in, args=door, daemon=True).start()
time.sleep(2.5)  # at a port that is no store the client waits without end
print(json.dumps(found), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Door:
    """A listening TCP socket."""

    command: str
    """Command line of its process."""
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """True if only processes of this host reach it."""
        return ipaddress.ip_address(self.host).is_loopback


def family(pids: list[int]) -> list[psutil.Process]:
    """The processes and all their descendants."""
    first = [psutil.Process(pid) for pid in pids]
    return [*first, *(child for process in first for child in process.children(recursive=True))]


def listening(pids: list[int]) -> list[Door]:
    """Every listening TCP socket of the processes and their descendants."""
    return [
        Door(command=" ".join(process.cmdline()), host=socket.laddr.ip, port=socket.laddr.port)
        for process in family(pids)
        for socket in process.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN
    ]


def stores(doors: list[Door]) -> dict[int, list[str]]:
    """Port -> keys of every torch TCPStore behind the doors, read as a stranger without any secret would."""
    targets = [["127.0.0.1" if door.loopback else door.host.replace("::", "127.0.0.1"), door.port] for door in doors]
    done = subprocess.run(
        [sys.executable, "-c", _STRANGER, json.dumps(targets)], capture_output=True, text=True, timeout=60, check=True
    )
    return {int(port): keys for port, keys in json.loads(done.stdout).items()}


def leaks(pids: list[int], secret: str) -> list[str]:
    """Where the secret shows: any command line, any environment variable but the one that carries it."""
    found = []
    for process in family(pids):
        if any(secret in word for word in process.cmdline()):
            found.append(f"{process.pid}: its command line")
        found += [
            f"{process.pid}: {name}"
            for name, value in process.environ().items()
            if secret in value and name != "MSRL_SECRET"
        ]
    return found

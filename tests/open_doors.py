"""Which TCP ports the processes of a run listen on, and which of them a stranger on the host could use as a store."""

import ipaddress
import json
import sys
from dataclasses import dataclass

import psutil
from programs import printed

_STRANGER = """
import json, os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist

found = {}
doors, seconds = json.loads(sys.argv[1]), float(sys.argv[2])

def listen_in(host, port):
    limit = timedelta(seconds=0.8 * seconds)
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        found[port] = [str(key) for key in store.list_keys()]
    except RuntimeError:
        pass

threads = [threading.Thread(target=listen_in, args=door, daemon=True) for door in doors]
for thread in threads:
    thread.start()
end = time.monotonic() + seconds
for thread in threads:  # at a port that is no store the client waits without end
    thread.join(max(0, end - time.monotonic()))
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
    def loopback(self):
        """True if only processes of this host reach it."""
        return ipaddress.ip_address(self.host).is_loopback


def family(pids):
    """The processes and all their descendants."""
    first = [psutil.Process(pid) for pid in pids]
    return [*first, *(child for process in first for child in process.children(recursive=True))]


def of_family(pids, look):
    """What a look at each of the processes and their descendants finds; a descendant may end meanwhile."""
    found = []
    for process in family(pids):
        try:
            found += look(process)
        except psutil.NoSuchProcess:
            if process.pid in pids:
                raise
    return found


def listening(pids):
    """Every listening TCP socket of the processes and their descendants."""

    def doors(process):
        command = " ".join(process.cmdline())
        sockets = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        return [Door(command=command, host=each.laddr.ip, port=each.laddr.port) for each in sockets]

    return of_family(pids, doors)


def stores(doors, *, within_s=2.5):
    """Port -> keys of every torch TCPStore behind the doors, read as a stranger without any secret would.

    within_s: takes this long where a door is no store.
    """
    targets = [["127.0.0.1" if door.loopback else door.host.replace("::", "127.0.0.1"), door.port] for door in doors]
    found = printed(sys.executable, "-c", _STRANGER, json.dumps(targets), within_s)
    return {int(port): keys for port, keys in json.loads(found).items()}


def leaks(pids, secret):
    """Where the secret shows: any command line, any environment variable but the one that carries it."""

    def places(process):
        variables = [name for name, value in process.environ().items() if secret in value and name != "MSRL_SECRET"]
        command = ["its command line"] if any(secret in word for word in process.cmdline()) else []
        return [f"{process.pid}: {place}" for place in command + variables]

    return of_family(pids, places)

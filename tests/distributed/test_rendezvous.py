"""Rendezvous of processes: files that only this user can read, or a store on one interface.

Why this matters: a store has no authentication, so who can connect is decided here. Two real processes meet in each
case, and their listening ports are inspected. Not exercised: two hosts, IPv6 routes, NCCL's sockets.
"""

import fcntl
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import open_doors
import pytest

from megatron_scalerl.distributed.rendezvous import (
    FolderRendezvous,
    HostRendezvous,
    Rendezvous,
    address_of,
    interface_of,
    listen_on,
    open_store,
    private_folder,
    serve_store,
    use_interface,
)

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=1)

RANK = """
import json, os, sys
from datetime import timedelta
import msgspec, torch, torch.distributed as dist
from megatron_scalerl.distributed.rendezvous import Rendezvous, open_store, use_interface

where, rank = msgspec.json.decode(sys.argv[1], type=Rendezvous), int(sys.argv[2])
use_interface(where)
store = open_store(where, "trainer", timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
value = torch.tensor(float(rank + 1))
dist.all_reduce(value)
print(value.item(), flush=True)
sys.stdin.read()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort a process while Python ends
"""


def two_ranks(rendezvous):
    """(sum of both ranks' values as each found it, the doors of both while their group stood)"""
    text = msgspec.json.encode(rendezvous).decode()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, text, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        sums = [float(process.stdout.readline()) for process in ranks]
        doors = open_doors.listening([process.pid for process in ranks])
        for process in ranks:
            process.communicate(timeout=120)
        assert [process.returncode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return sums, doors


@pytest.mark.slow
def test_two_processes_meet_at_a_store_that_one_of_them_binds_to_one_interface():
    listening = listen_on("127.0.0.1")
    where = address_of(listening)
    store = serve_store(listening)
    sums, doors = two_ranks(where)
    assert sums == [3.0, 3.0]
    assert doors and all(door.loopback for door in doors)
    mine = [door for door in open_doors.listening([os.getpid()]) if door.port == where.port]
    assert [door.host for door in mine] == ["127.0.0.1"]
    # and this is what a stranger reads there, which is why no key may be a secret
    assert any(key.startswith("trainer/") for key in open_doors.stores(mine, within_s=60)[where.port])
    del store


def test_a_folder_is_private_fresh_and_deleted_afterwards():
    with private_folder() as first, private_folder() as second:
        assert first != second
        assert os.stat(first.folder).st_mode & 0o777 == 0o700
        open_store(first, "a", timeout=LIMIT).set("key", "value")
        assert open_store(first, "a", timeout=LIMIT).get("key") == b"value"
        assert os.listdir(second.folder) == []
    assert not Path(first.folder).exists() and not Path(second.folder).exists()


def test_groups_do_not_see_each_other(tmp_path):
    tmp_path.chmod(0o700)
    listening = listen_on("127.0.0.1")
    where = address_of(listening)
    server = serve_store(listening)
    for rendezvous in (where, FolderRendezvous(folder=str(tmp_path))):
        for name in ("trainer", "weights"):
            open_store(rendezvous, name, timeout=LIMIT).set("key", name)
        assert open_store(rendezvous, "trainer", timeout=LIMIT).get("key") == b"trainer"
    del server


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    for mode in (0o755, 0o770, 0o701):
        tmp_path.chmod(mode)
        with pytest.raises(RuntimeError, match=rf"rendezvous: .* mode {mode:04o}"):
            open_store(FolderRendezvous(folder=str(tmp_path)), "trainer", timeout=LIMIT)
    tmp_path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(RuntimeError, match=r"rendezvous: .*has to be a folder"):
        open_store(FolderRendezvous(folder=str(link)), "trainer", timeout=LIMIT)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_user_s_folder_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(RuntimeError, match=r"rendezvous: .* belongs to user 12345"):
        open_store(FolderRendezvous(folder=str(tmp_path)), "trainer", timeout=LIMIT)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_store_on_every_interface_is_refused(host):
    with pytest.raises(ValueError, match=r"rendezvous: .* all interfaces"):
        listen_on(host)


@pytest.mark.parametrize("given, nccl", [({}, "lo"), ({"NCCL_SOCKET_IFNAME": "ib0"}, "ib0")])
def test_collectives_use_the_interface_that_leads_to_their_peers_and_nccl_the_users_between_hosts(
    monkeypatch, given, nccl
):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for name, value in {"GLOO_SOCKET_IFNAME": "eth7", **given}.items():
        monkeypatch.setenv(name, value)
    use_interface(HostRendezvous(host="127.0.0.1", port=1))
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", nccl)
    with private_folder() as where:
        assert interface_of(where) == "lo"
        use_interface(where)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_rendezvous_travels_as_json():
    for where in (FolderRendezvous(folder="/a"), HostRendezvous(host="10.0.0.1", port=4711)):
        plain = json.loads(json.dumps(msgspec.to_builtins(where)))
        assert msgspec.convert(plain, Rendezvous) == where
    with pytest.raises(ValueError):
        msgspec.convert({"type": "FolderRendezvous", "folder": 1}, Rendezvous)


def test_nobody_answers():
    listening = listen_on("127.0.0.1")
    where = address_of(listening)
    listening.close()
    with pytest.raises(RuntimeError):
        open_store(where, "trainer", timeout=SHORT)


def test_a_lock_keeps_others_from_deleting_the_folder():
    with private_folder() as where:
        folder = os.open(where.folder, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)

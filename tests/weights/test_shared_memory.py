"""The broadcast group in shared memory: who may join, and who leaves. What it moves: test_transport.py."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron_scalerl.weights.transport import make_sender
from megatron_scalerl.weights.transport.shm import ShmGroup


@pytest.fixture
def the_limit_of_a_sender_passes_once_a_member_is_there(monkeypatch):
    late, check = threading.local(), ShmGroup._check

    def checked(group, member):
        check(group, member)
        late.by = 240 if group._leads else 0

    monkeypatch.setattr(ShmGroup, "_check", checked)
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + getattr(late, "by", 0))
    monkeypatch.setattr("megatron_scalerl.weights.transport.shm.time", clock)


@pytest.mark.usefixtures("the_limit_of_a_sender_passes_once_a_member_is_there")
def test_a_sender_that_leaves_while_the_group_is_formed_is_an_error_of_the_receiver(spec):
    connection = spec(backend="shm", world_sizes=(3,), connect_timeout_s=240)
    with ThreadPoolExecutor(2) as pool:
        ends = pool.submit(make_sender, connection), pool.submit(ShmGroup, connection, 1)
        assert all("the weight group was not formed" in str(end.exception()) for end in ends[:1])
        group = ends[1].result()  # it had joined; the third member never came
    with pytest.raises(RuntimeError, match="the sender of the weight group left"):
        group.broadcast(torch.zeros(4))


def test_a_process_of_another_user_is_refused(monkeypatch):
    group, (here, there) = object.__new__(ShmGroup), socket.socketpair()
    group._timeout = 1
    with here, there:
        group._check(here)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(PermissionError, match=r"user \d+.* user \d+"):
            group._check(here)

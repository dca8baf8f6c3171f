"""The broadcast group over gloo: sender and receivers are threads of one process, each with a group and a store."""

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
import torch

from megatron_scalerl.checkpoints.manifest import manifest_of
from megatron_scalerl.distributed.rendezvous import address_of, listen_on, private_folder, serve_store
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.digest import combine
from megatron_scalerl.weights.transport import make_sender, resolve_transport
from megatron_scalerl.weights.transport.gloo import Group, receive


@pytest.fixture
def spec(monkeypatch):
    """Makes connections with a rendezvous in a private folder of the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # the group chooses for itself
    with private_folder() as rendezvous:

        def make(world_size=2, **changes):
            base = Connection(
                backend="gloo",
                rendezvous=rendezvous,
                group=uuid.uuid4().hex,
                world_size=world_size,
                bucket_mib=1,
                timeout_s=20,
                connect_timeout_s=20,
            )
            return replace(base, **changes)

        yield make


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=g),
        "b": torch.randn(300_000, generator=g).bfloat16(),
        "scalar": torch.tensor(2.5),
        "c": torch.randn(400, 1000, generator=g).t(),  # not contiguous, beyond one bucket
    }


def manifest(weights):
    return manifest_of((n, str(t.dtype).removeprefix("torch."), t.shape) for n, t in weights.items())


def joined(connection, receivers=1):
    """(sender, groups of the receivers)"""
    with ThreadPoolExecutor(receivers + 1) as pool:
        sender = pool.submit(make_sender, connection)
        groups = [pool.submit(Group, connection, rank + 1) for rank in range(receivers)]
        return sender.result(), [g.result() for g in groups]


def transfer(sender, groups, weights, *, sent_version=1, version=1, expected=None, flip=None):
    """(sender's report or error, what each receiver got or its error)"""
    if flip is not None:
        ship = sender._ship

        def faulty(packed):
            packed[flip] ^= 1
            ship(packed)

        sender._ship = faulty

    def take(group):
        digests = []
        try:
            got = dict(receive(group, manifest(expected or weights), version, digests))
        except RuntimeError:
            group.close()
            raise
        return got, combine(digests)

    with ThreadPoolExecutor(len(groups) + 1) as pool:
        sent = pool.submit(sender.send, iter(weights.items()), manifest(weights), sent_version)
        taken = [pool.submit(take, group) for group in groups]
        errors = [f.exception() for f in (sent, *taken)]
        return [error or f.result() for error, f in zip(errors, (sent, *taken))]


@pytest.mark.parametrize("where", ["in a folder", "at a store"])
def test_two_receivers_get_two_updates_bit_for_bit(spec, where):
    connection = spec(world_size=3)
    if where == "at a store":
        listening = listen_on("127.0.0.1")
        connection = replace(connection, rendezvous=address_of(listening))
        store = serve_store(listening)
        assert store.num_keys() >= 0
    sender, groups = joined(connection, receivers=2)
    for seed in (0, 1):
        weights = tensors(seed)
        report, *received = transfer(sender, groups, weights)
        for got, digest in received:
            assert list(got) == list(weights) and digest == report.digest
            for name, tensor in weights.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        # 60 -> 64, 600,000, 4 -> 16 and 1,600,000 bytes
        assert report.bytes == 64 + 600_000 + 16 + 1_600_000 and report.seconds > 0


@pytest.mark.parametrize("byte", [0, -1])
def test_a_flipped_bit_is_noticed(spec, byte):
    sender, groups = joined(spec())
    _, error = transfer(sender, groups, tensors(), flip=byte)
    assert isinstance(error, RuntimeError) and "bucket 0 of 2: expected digest" in str(error)


def test_another_version_and_another_manifest_are_noticed(spec):
    for changes in ({"version": 2}, {"expected": {"a": torch.zeros(3, 5)}}):
        sender, groups = joined(spec(timeout_s=5))
        _, error = transfer(sender, groups, tensors(), **changes)
        assert isinstance(error, RuntimeError) and "expected the header" in str(error)


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        ({"a": torch.zeros(3, 4)}, r"expected ParamMeta\(name='a', .*shape=\(3, 5\)\), found .*\(3, 4\)"),
        ({}, "found ParamMeta.name='nothing'"),
        ({"a": torch.zeros(3, 5), "b": torch.zeros(1)}, "found b after the last"),
    ],
)
def test_weights_that_differ_from_the_manifest_fail_the_update_on_both_sides(spec, sent, line):
    sender, (group,) = joined(spec())
    promised = manifest({"a": torch.zeros(3, 5)})
    with ThreadPoolExecutor(2) as pool:
        send = pool.submit(sender.send, iter(sent.items()), promised, 1)
        take = pool.submit(lambda: list(receive(group, promised, 1, [])))
        with pytest.raises(ValueError, match=line):
            send.result()
        if "b" not in sent:  # the surplus is noticed after the last bucket has gone
            with pytest.raises(RuntimeError):
                take.result()
    with pytest.raises(RuntimeError, match="is closed"):
        sender.send(iter(sent.items()), promised, 2)


def test_a_group_without_receivers_times_out(spec):
    with pytest.raises(RuntimeError):
        make_sender(spec(connect_timeout_s=1))


def test_groups_of_one_folder_do_not_mix(spec):
    """An engine with an earlier connection does not join the later one."""
    connection = spec(connect_timeout_s=1)
    with ThreadPoolExecutor(2) as pool:
        stale = replace(connection, group="weights-of-an-earlier-connection")
        ends = pool.submit(make_sender, connection), pool.submit(Group, stale, 1)
        assert all(isinstance(end.exception(), RuntimeError) for end in ends)


def test_invalid_connections_are_refused(spec):
    with pytest.raises(ValueError, match=r"weights\.transport: expected one of \['gloo', 'nccl'\], found 'smoke'"):
        make_sender(spec(backend="smoke"))
    plain = msgspec.to_builtins(spec())
    assert msgspec.convert(plain, Connection).world_size == 2
    with pytest.raises(ValueError, match="missing required field `rendezvous`"):
        msgspec.convert({name: value for name, value in plain.items() if name != "rendezvous"}, Connection)
    assert (resolve_transport("gloo"), resolve_transport("nccl")) == ("gloo", "nccl")
    assert resolve_transport("auto") == ("nccl" if torch.cuda.is_available() else "gloo")


RECEIVER = """
import sys, msgspec, torch
from megatron_scalerl.weights.connection import Connection
from megatron_scalerl.weights.transport.gloo import Group

group = Group(msgspec.json.decode(sys.argv[1], type=Connection), 1)
head = torch.zeros(4, dtype=torch.int64)
group.broadcast(head)
print("header", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_vanishes_in_the_middle_of_a_broadcast_ends_the_update_in_time(spec, how):
    connection = spec(bucket_mib=64, timeout_s=3, connect_timeout_s=60)  # the receiver has torch to import
    weights = {"a": torch.zeros(16 << 20)}  # 64 MiB: more than the sockets hold
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, msgspec.json.encode(connection).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        sender = make_sender(connection)
        ship = sender._ship

        def after_the_header(packed):
            receiver.send_signal(how)
            ship(packed)

        sender._ship = after_the_header
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            sender.send(iter(weights.items()), manifest(weights), 1)
        assert time.monotonic() - began < 30, "the broadcast's own limit of 3 s, not the caller's patience"
        with pytest.raises(RuntimeError, match="is closed"):
            sender.send(iter(weights.items()), manifest(weights), 2)
    finally:
        receiver.kill()
        receiver.wait()

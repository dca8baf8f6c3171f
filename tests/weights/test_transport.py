"""The broadcast group over gloo: sender and receivers are threads of one process, each with a group and a store."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.nccl import NcclProcessGroup
from transfers import KINDS, flip, joined, manifest, or_leaves, plan_of, reader, tensors

from megatron_scalerl.distributed.rendezvous import HostRendezvous, address_of, listen_on, private_folder, serve_store
from megatron_scalerl.weights.plan import Connection, Part, WeightPlan, buckets
from megatron_scalerl.weights.transport import join_sender, make_sender, resolve_transport
from megatron_scalerl.weights.transport.frames import assembled_tensors, receive
from megatron_scalerl.weights.transport.gloo import NcclGroup


def transfer(senders, receivers, weights, *, plan=None, sent_version=1, version=1, expected=None):
    """(each sender's digests or error, what each receiver got or its error)"""
    plan = plan or plan_of(weights)

    def take(groups):
        digests = []
        parts = receive(groups, expected or plan, version, digests)
        return dict(assembled_tensors(parts, expected or plan)), digests

    with ThreadPoolExecutor(len(receivers) + len(senders)) as pool:
        sent = [pool.submit(sender.send, plan, reader(weights, plan), sent_version) for sender in senders]
        taken = [pool.submit(or_leaves, groups, partial(take, groups)) for groups in receivers]
        errors = [f.exception() for f in (*sent, *taken)]
        return [error or f.result() for error, f in zip(errors, (*sent, *taken))]


@pytest.mark.parametrize("where", ["in a folder", "at a store"])
def test_two_receivers_get_two_updates_bit_for_bit(spec, where):
    connection = spec(world_size=3)
    if where == "at a store":
        if connection.backend == "shm":
            pytest.skip("shared memory is of one host")
        listening = listen_on("127.0.0.1")
        connection = replace(connection, rendezvous=address_of(listening))
        store = serve_store(listening)
        assert store.num_keys() >= 0
    senders, receivers = joined(connection, receivers=2)
    for seed in (0, 1):
        weights = tensors(seed)
        sent, *received = transfer(senders, receivers, weights)
        for got, digests in received:
            assert list(got) == list(weights) and digests == sent
            for name, tensor in weights.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        # 60 -> 64, 600,000, 4 -> 16 and 1,600,000 bytes, of which the last does not fit into one bucket
        assert sum(b.nbytes for b in buckets(plan_of(weights), 1)) == 64 + 600_000 + 16 + 1_600_000


def test_three_senders_make_up_the_same_tensors(spec):
    weights, cuts = tensors(), (0, 100, 250, 1000)
    parts = [Part(0, 2, 0, ((0, 3), (0, 5))), Part(2, 1, 0, ())]
    parts += [Part(1, n % 3, 0, ((n * 1000, (n + 1) * 1000),)) for n in range(300)]
    parts += [Part(3, n, 0, (rows, (0, 400))) for n, rows in enumerate(pairwise(cuts))]
    plan = WeightPlan(parameters=manifest(weights), senders=3, needs=plan_of(weights).needs, parts=tuple(parts))
    senders, receivers = joined(spec(world_size=3), receivers=2, senders=3)
    for version in (1, 2):
        *sent, first, second = transfer(senders, receivers, weights, plan=plan, sent_version=version, version=version)
        order = buckets(plan, 1)
        by_sender = [[d for d, b in zip(first[1], order) if b.sender == number] for number in range(3)]
        assert by_sender == sent and first[1] == second[1]
        for got in (first[0], second[0]):
            assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in got)


def test_a_sender_that_leaves_ends_the_update_of_all(spec):
    weights = tensors()
    half = [Part(3, n, 0, ((500 * n, 500 * (n + 1)), (0, 400))) for n in (0, 1)]
    rest = plan_of(weights).parts[:3]
    needs = plan_of(weights).needs
    plan = WeightPlan(parameters=manifest(weights), senders=2, needs=needs, parts=(*rest, *half))
    (here, gone), receivers = joined(spec(timeout_s=5), senders=2)
    gone.close()
    *sent, received = transfer([here, gone], receivers, weights, plan=plan)
    assert all(isinstance(found, RuntimeError) for found in (*sent, received)), (sent, received)


@pytest.mark.slow
@pytest.mark.parametrize("byte", [0, -1])
def test_a_flipped_bit_is_noticed(spec, byte):
    senders, receivers = joined(spec())
    flip(senders[0], byte)
    _, error = transfer(senders, receivers, tensors())
    assert isinstance(error, RuntimeError) and "bucket 0 of 3 has digest" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "repeated", "swapped", "of the update before"])
def test_a_bucket_that_is_not_the_next_one_is_noticed_before_it_is_used(spec, fault):
    """Four buckets of one size, each with a digest that fits its bytes."""
    weights = {"a": torch.arange(1 << 20).float()}  # 4 MiB
    (sender,), (groups,) = joined(spec())
    plan, ship, sent = plan_of(weights), sender._ship, []

    def recorded(shard, packed):
        sent.append(packed.clone())
        return ship(shard, packed)

    sender._ship = recorded
    transfer([sender], [groups], weights)
    before, here, taken = list(sent), [], []

    def faulty(shard, packed):
        here.append(packed)
        wrong = {"repeated": here[0], "of the update before": before[1]}
        if len(here) == 2 and fault in ("lost", "swapped"):
            return lambda: None  # held back
        if len(here) == 3 and fault == "swapped":
            ends = [ship(shard, here[2]), ship(shard, here[1])]
            return lambda: [end() for end in ends]
        return ship(shard, wrong.get(fault, packed) if len(here) == 2 else packed)

    sender._ship = faulty

    def take():
        for part in receive(groups, plan, 2, []):
            taken.append(part)

    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.send, plan, reader(weights, plan), 2)
        receiving = pool.submit(or_leaves, groups, take)
        assert "bucket 1 of 4 has digest" in str(receiving.exception())
        sending.exception()  # of a group that the receiver has left, or none: it may have sent everything by then
    assert len(taken) == 1


def test_another_version_and_another_plan_are_noticed(spec):
    for changes in ({"version": 2}, {"expected": plan_of({"a": torch.zeros(3, 5)})}):
        senders, receivers = joined(spec())
        _, error = transfer(senders, receivers, tensors(), **changes)
        assert isinstance(error, RuntimeError) and "the header is" in str(error)


@pytest.mark.parametrize("found", [torch.zeros(3, 4), torch.zeros(3, 5).bfloat16()])
def test_weights_that_differ_from_the_plan_fail_the_update_on_both_sides(spec, found):
    (sender,), (groups,) = joined(spec())
    promised = plan_of({"a": torch.zeros(3, 5)})
    with ThreadPoolExecutor(2) as pool:
        send = pool.submit(sender.send, promised, lambda part: found, 1)
        take = pool.submit(lambda: list(receive(groups, promised, 1, [])))
        with pytest.raises(AssertionError, match=r"^a"):
            send.result()
        with pytest.raises(RuntimeError):
            take.result()
    with pytest.raises(RuntimeError, match="is closed"):
        sender.send(promised, lambda part: found, 2)


def test_a_group_without_receivers_times_out(spec):
    with pytest.raises(RuntimeError):
        make_sender(spec(connect_timeout_s=1))


@pytest.mark.slow
def test_groups_of_one_folder_do_not_mix(spec):
    """An engine with an earlier connection does not join the later one."""
    connection = spec(connect_timeout_s=1)
    with ThreadPoolExecutor(2) as pool:
        stale = replace(connection, group="weights-of-an-earlier-connection")
        ends = pool.submit(make_sender, connection), pool.submit(KINDS[connection.backend], stale, 1)
        assert all(isinstance(end.exception(), RuntimeError) for end in ends)


def test_a_long_path_of_the_temporary_folder(spec, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with private_folder() as rendezvous:
        connection = spec(rendezvous=rendezvous)
        [sender], [groups] = joined(connection)
        sent, (got, digests) = transfer([sender], [groups], tensors())
        assert digests == sent and len(got) == 4


def test_invalid_connections_are_refused(spec):
    with pytest.raises(
        ValueError, match=r"weights\.transport: expected one of \['gloo', 'nccl', 'shm'\], found 'smoke'"
    ):
        make_sender(spec(backend="smoke"))
    plain = msgspec.to_builtins(spec())
    assert msgspec.convert(plain, Connection).world_sizes == (2,)
    with pytest.raises(ValueError, match="missing required field `rendezvous`"):
        msgspec.convert({name: value for name, value in plain.items() if name != "rendezvous"}, Connection)
    assert (resolve_transport("gloo"), resolve_transport("nccl")) == ("gloo", "nccl")
    assert resolve_transport("auto") == ("nccl" if torch.cuda.is_available() else "gloo")
    with private_folder() as one_host:
        assert resolve_transport("auto", one_host) == ("nccl" if torch.cuda.is_available() else "shm")
        assert resolve_transport("gloo", one_host) == "gloo"
        assert resolve_transport("auto", one_host, colocated=True) == "shm"
    assert resolve_transport("auto", HostRendezvous(host="10.0.0.1", port=1)) != "shm"


RECEIVER = """
import sys, msgspec, torch
from megatron_scalerl.weights.plan import Connection
from megatron_scalerl.weights.transport import join_sender

connection = msgspec.json.decode(sys.argv[1], type=Connection)
group = join_sender(connection, 1, 0, 0)
head = torch.zeros(5, dtype=torch.int64)
group.broadcast(head)
print("header", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_vanishes_in_the_middle_of_a_broadcast_ends_the_update_in_time(spec, how):
    connection = spec(bucket_mib=64, timeout_s=3, connect_timeout_s=3600)  # the receiver has torch to import
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

        def after_the_header(shard, packed):
            receiver.send_signal(how)
            return ship(shard, packed)

        sender._ship = after_the_header
        with pytest.raises(RuntimeError):  # by the broadcast's own limit of 3 s, not by the caller's patience
            sender.send(plan_of(weights), reader(weights, plan_of(weights)), 1)
        with pytest.raises(RuntimeError, match="is closed"):
            sender.send(plan_of(weights), reader(weights, plan_of(weights)), 2)
    finally:
        receiver.kill()
        receiver.wait()


@pytest.fixture
def nccl(monkeypatch):
    """A stand-in for NCCL and its device, which are not here; this one's groups."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclProcessGroup, raising=False)
    monkeypatch.setattr(NcclProcessGroup, "made", [])
    return NcclProcessGroup.made


def test_a_group_over_nccl_has_the_stores_name_of_its_sender_and_shard(spec, nccl, monkeypatch):
    names = []
    monkeypatch.setattr(
        "megatron_scalerl.weights.transport.gloo.open_store",
        lambda _, name, timeout: names.append(name) or torch.distributed.HashStore(),
    )
    sender = make_sender(spec(backend="nccl", world_sizes=(1, 1, 1), group="g"), 1, (0, 2))
    assert names == ["g-1-0", "g-1-2"] and {type(group) for group in sender.groups.values()} == {NcclGroup}


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_over_nccl_connects_at_once_and_has_no_watchdog(spec, nccl, monkeypatch, before):
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    connection = spec(backend="nccl", world_size=3)
    with ThreadPoolExecutor(3) as pool:  # each waits for the others
        sender, *_ = [pool.submit(NcclGroup, connection, rank) for rank in range(3)]
        group = sender.result()
    assert [(each.blocking_wait, each.calls) for each in nccl] == 3 * [("1", [("connect", torch.device("cpu", 0))])]
    assert all(each.options.config.max_ctas <= 8 for each in nccl)  # channels, each with buffers on the device
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before  # the trainer's own groups keep their watchdog
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("waited for the whole device"))
    group.start(torch.zeros(1))()
    assert [call[0] for call in group._group.calls] == ["connect", "broadcast", "wait"]


def test_a_group_over_nccl_is_not_formed_without_a_member_that_does_not_come(spec, nccl):
    with pytest.raises(RuntimeError, match=r"[Tt]ime"):
        make_sender(spec(backend="nccl", connect_timeout_s=0.5))
    assert [each.calls for each in nccl] == [["abort"]]  # NCCL, which has no such limit, was not asked to connect


def test_a_group_over_nccl_whose_member_is_gone_when_it_connects_is_closed(spec, nccl, monkeypatch):
    monkeypatch.setattr(NcclProcessGroup, "fails", True)
    with pytest.raises(RuntimeError, match="remote process exited"):
        make_sender(spec(backend="nccl", world_size=1))
    assert nccl[0].calls[-1] == "abort"


def test_the_names_that_nccl_groups_use_are_those_of_the_torch_that_is_installed():
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert '"TORCH_NCCL_BLOCKING_WAIT"' in header.read_text()
    stubs = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    assert "def eager_connect_single_device(self, device" in stubs and "max_ctas: int" in stubs


def test_a_group_that_is_not_formed_closes_the_others_of_its_sender(spec, monkeypatch):
    connection = spec(world_sizes=(2, 2), timeout_s=3600)

    def group(connection, rank, sender, shard):
        limit = 1 if shard == 1 else 240
        return KINDS[connection.backend](replace(connection, connect_timeout_s=limit), rank, sender, shard)

    monkeypatch.setattr("megatron_scalerl.weights.transport._group_class", lambda *_: group)
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(make_sender, connection, 0, (0, 1))
        receiver = pool.submit(join_sender, connection, 1, 0, 0).result()  # nobody joins for shard 1
        with pytest.raises(RuntimeError):  # at once, not by its own limit
            receiver.broadcast(torch.zeros(5, dtype=torch.int64))
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):
            sender.result()

"""Updates that are received in a thread, over gloo: what `take` gives out, and how they end early."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transfers import joined, plan_of, reader, tensors
from waiting import wait_until

from megatron_scalerl.weights.staging import StagedUpdate
from megatron_scalerl.weights.transport.frames import assembled


def staged(connection, weights, *, version=1):
    """(senders, an update that is being received)"""
    senders, [groups] = joined(connection)
    return senders, StagedUpdate(groups, plan_of(weights), version, holds=None)


def send(senders, weights, version=1):
    plan = plan_of(weights)
    with ThreadPoolExecutor(len(senders)) as pool:
        return [f.result() for f in [pool.submit(s.send, plan, reader(weights, plan), version) for s in senders]]


def ended(update):
    """The state that is not None."""
    wait_until(lambda: update.state() is not None)
    return update.state()


def test_parts_arrive_while_nobody_waits_and_are_given_out_once(spec):
    weights = tensors()
    senders, update = staged(spec(), weights)
    assert update.state() is None
    [digests] = send(senders, weights)
    assert ended(update) == "" and update.digests == digests
    got = dict(assembled(update.take(), plan_of(weights)))
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())
    assert list(update.take()) == []


def test_take_waits_for_what_is_on_its_way(spec):
    weights = tensors()
    senders, update = staged(spec(), weights)
    join, waits = update._thread.join, threading.Event()
    update._thread.join = lambda: (waits.set(), join())
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: list(update.take()))
        assert waits.wait(240) and not taken.done()
        send(senders, weights)
        assert len(taken.result()) > len(weights)


def test_a_flipped_bit_gives_no_part_out(spec):
    weights = tensors()
    [sender], update = staged(spec(timeout_s=600), weights)
    ship = sender._ship

    def flipped(shard, packed):
        if len(packed) > 100_000:
            packed[1000] ^= 1
        return ship(shard, packed)

    sender._ship = flipped
    with pytest.raises(RuntimeError):
        send([sender], weights)
    assert "has digest" in ended(update)
    with pytest.raises(RuntimeError, match="has digest"):
        next(update.take())


def test_another_version_than_was_staged_is_refused(spec):
    weights = tensors()
    senders, update = staged(spec(timeout_s=600), weights, version=7)
    with pytest.raises(RuntimeError):
        send(senders, weights, version=6)
    assert "the header is" in ended(update)


def test_a_sender_that_leaves_ends_it(spec):
    [sender], update = staged(spec(timeout_s=600), tensors())
    sender.close()
    assert ended(update)
    with pytest.raises(RuntimeError):
        next(update.take())


def test_one_that_nothing_arrives_for_is_discarded_without_waiting_and_ends_with_its_sender(spec):
    [sender], update = staged(spec(timeout_s=600), tensors())
    update.discard()
    assert update.state() is None
    sender.close()
    assert ended(update)


def test_what_arrives_for_a_discarded_one_is_dropped_and_its_sender_told(spec):
    senders, update = staged(spec(timeout_s=600), tensors())
    update.discard()
    with pytest.raises(RuntimeError):
        send(senders, tensors())
    assert "discarded" in ended(update)
    with pytest.raises(RuntimeError, match="discarded"):
        next(update.take())


def test_groups_are_closed_where_an_update_that_is_complete_is_discarded(spec):
    [sender], update = staged(spec(timeout_s=600), tensors())
    send([sender], tensors())
    assert ended(update) == ""
    update.discard()
    with pytest.raises(RuntimeError):
        send([sender], tensors(), version=2)


def test_a_bug_in_the_thread_is_not_an_update(spec, monkeypatch):
    def broken(*_, **__):
        raise TypeError("a bug")
        yield

    monkeypatch.setattr("megatron_scalerl.weights.staging.receive", broken)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    _, update = staged(spec(), tensors())
    assert "a bug ended the receiving thread" in ended(update)
    with pytest.raises(RuntimeError, match="a bug"):
        next(update.take())

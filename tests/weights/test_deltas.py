"""Updates of changes over gloo: what receivers hold after each, what is sent whole, and what is refused."""

import re
from dataclasses import replace

import pytest
from transfers import Held, digest_of, equal, joined, manifest, plan_of, stepped, tensors, update

from megatron_scalerl.weights.digest import total
from megatron_scalerl.weights.plan import Part, WeightPlan, buckets


def test_updates_of_changes_are_a_whole_update_bit_for_bit(spec):
    senders, receivers = joined(spec(world_size=3, deltas="absolute"), receivers=2)
    weights, sizes = tensors(), []
    held = [Held(weights), Held(weights)]
    for version in range(1, 6):
        sent, *taken = update(senders, receivers, held, weights, version)
        assert taken == [sent, sent] and equal(held[0], weights) and equal(held[1], weights)
        assert senders[0].values == {0: digest_of(weights)}
        sizes.append(senders[0].bytes)
        weights = stepped(weights, version)
    whole = sum(bucket.nbytes for bucket in buckets(plan_of(weights), 1))
    assert [size == whole for size in sizes] == [True, False, False, False, False]
    assert max(size for size in sizes if size != whole) < 0.05 * whole


def test_nothing_is_sent_where_nothing_changed_and_all_where_much_did(spec):
    senders, receivers = joined(spec(deltas="absolute"))
    weights = tensors()
    held = Held(weights)
    update(senders, receivers, [held], weights, 1)
    sent, taken = update(senders, receivers, [held], weights, 2)
    assert sent == taken == [0, 0, 0] and senders[0].bytes == 0 and held.kinds == []
    weights = stepped(weights, 0)
    weights["b"] = weights["b"] * 1.5  # with `a` in the first bucket, which is sent whole again
    sent, taken = update(senders, receivers, [held], weights, 3)
    assert sent == taken and equal(held, weights) and senders[0].values == {0: digest_of(weights)}
    assert held.kinds[:3] == ["Values"] * 3 and set(held.kinds[3:]) == {"Changes"}


def test_three_senders_send_changes_of_their_own_parts(spec):
    weights, cuts = tensors(), (0, 100, 250, 1000)
    parts = [Part(0, 2, 0, ((0, 3), (0, 5))), Part(2, 1, 0, ())]
    parts += [Part(1, n % 3, 0, ((n * 1000, (n + 1) * 1000),)) for n in range(300)]
    parts += [Part(3, n, 0, (rows, (0, 400))) for n, rows in enumerate(zip(cuts, cuts[1:]))]
    plan = WeightPlan(parameters=manifest(weights), senders=3, needs=plan_of(weights).needs, parts=tuple(parts))
    senders, receivers = joined(spec(deltas="absolute"), senders=3)
    held = Held(weights)
    for version in range(1, 5):
        *sent, taken = update(senders, receivers, [held], weights, version, plan)
        order = buckets(plan, 1)
        assert sent == [[d for d, b in zip(taken, order) if b.sender == number] for number in range(3)]
        assert equal(held, weights) and total([s.values[0] for s in senders]) == digest_of(weights)
        weights = stepped(weights, version)


@pytest.mark.parametrize("holds", [None, 1, 5])
def test_changes_of_a_version_that_a_receiver_does_not_hold_are_refused(spec, holds):
    senders, receivers = joined(spec(deltas="absolute"))
    weights = tensors()
    held = Held(weights)
    for version in (1, 2):
        update(senders, receivers, [held], weights, version)
    before = {name: tensor.clone() for name, tensor in held.weights.items()}
    held.version = holds
    _, error = update(senders, receivers, [held], stepped(weights, 0), 3)
    held_version = "no version" if holds is None else f"version {holds}"
    assert re.match(f"weight update: .* version 2, .* {held_version}$", str(error))
    assert equal(held, before)


@pytest.mark.slow
def test_a_flipped_bit_in_changes_is_noticed_before_one_is_written(spec):
    senders, receivers = joined(spec(deltas="absolute"))
    weights = tensors()
    held = Held(weights)
    update(senders, receivers, [held], weights, 1)
    ship = senders[0]._ship

    def faulty(shard, packed):
        packed[17] ^= 4
        return ship(shard, packed)

    senders[0]._ship = faulty
    _, error = update(senders, receivers, [held], stepped(weights, 0), 2)
    assert "bucket 0 of 3 has digest" in str(error) and equal(held, weights)


def test_a_new_connection_begins_with_all_values(spec):
    connection = spec(deltas="absolute")
    weights = tensors()
    for name in ("first", "second"):
        senders, receivers = joined(replace(connection, group=name))
        held = Held(weights)
        assert update(senders, receivers, [held], weights, 1)[1] and set(held.kinds) == {"Values"}
        update(senders, receivers, [held], stepped(weights, 0), 2)
        assert set(held.kinds) == {"Changes"}

"""Updates of changes over gloo: what receivers hold after each, what is sent whole, and what is refused."""

import re
from dataclasses import replace

import pytest
from transfers import Held, digest_of, equal, flip, joined, stepped, tensors, update


def begun(spec, updates):
    """(senders, receivers, the tensors, what one holds) after whole updates of the same values."""
    senders, receivers = joined(spec(deltas="absolute"))
    weights = tensors()
    held = Held(weights)
    for version in range(1, updates + 1):
        update(senders, receivers, [held], weights, version)
    return senders, receivers, weights, held


def test_nothing_is_sent_where_nothing_changed_and_all_where_much_did(spec):
    senders, receivers, weights, held = begun(spec, 1)
    sent, taken = update(senders, receivers, [held], weights, 2)
    assert sent == taken == [0, 0, 0] and senders[0].bytes == 0 and held.kinds == []
    weights = stepped(weights, 0)
    weights["b"] = weights["b"] * 1.5  # with `a` in the first bucket, which is sent whole again
    sent, taken = update(senders, receivers, [held], weights, 3)
    assert sent == taken and equal(held, weights) and senders[0].values == {0: digest_of(weights)}
    assert held.kinds[:3] == ["Values"] * 3 and set(held.kinds[3:]) == {"Changes"}


@pytest.mark.parametrize("holds", [None, 1, 5])
def test_changes_of_a_version_that_a_receiver_does_not_hold_are_refused(spec, holds):
    senders, receivers, weights, held = begun(spec, 2)
    before = {name: tensor.clone() for name, tensor in held.weights.items()}
    held.version = holds
    _, error = update(senders, receivers, [held], stepped(weights, 0), 3)
    held_version = "no version" if holds is None else f"version {holds}"
    assert re.match(f"weight update: .* version 2, .* {held_version}$", str(error))
    assert equal(held, before)


@pytest.mark.slow
def test_a_flipped_bit_in_changes_is_noticed_before_one_is_written(spec):
    senders, receivers, weights, held = begun(spec, 1)
    flip(senders[0], 17)
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

"""Updates of changes over gloo: what receivers hold after each, what is sent whole, and what is refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from test_transport import joined, manifest, or_leaves, plan_of, reader, spec, tensors  # noqa: F401 - a fixture

from megatron_scalerl.weights.changes import Changes, bits_of
from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import Part, WeightPlan, buckets
from megatron_scalerl.weights.transport.frames import Told, receive


class Held:
    """What a receiver has, written part by part as an engine would."""

    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(tensor).contiguous() for name, tensor in weights.items()}
        self.version, self.kinds = None, []

    def take(self, groups, plan, version):
        told, self.kinds = Told(), []
        or_leaves(groups, lambda: self._write(plan, receive(groups, plan, version, told, holds=self.version)))
        self.version = version
        return told.digests

    def _write(self, plan, parts):
        for part in parts:
            self.kinds.append(type(part).__name__)
            tensor = self.weights[plan.parameters[part.tensor].name]
            cut = tensor[tuple(slice(a, b) for a, b in part.ranges)]
            if isinstance(part, Changes):
                flat = cut.contiguous().view(-1)
                flat[part.positions] = part.bits(bits_of(flat)[part.positions]).view(flat.dtype)
                cut.copy_(flat.view(cut.shape))
            else:
                cut.copy_(part.values)


def update(senders, receivers, held, weights, version, plan=None):
    """Each sender's digests, each receiver's; or their errors."""
    plan = plan or plan_of(weights)
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(sender.send, plan, reader(weights, plan), version) for sender in senders]
        taken = [pool.submit(each.take, groups, plan, version) for each, groups in zip(held, receivers)]
        return [f.exception() or f.result() for f in (*sent, *taken)]


def digest_of(weights):
    parts = [
        value_digest(tensor, number, range(tensor.dim()), [range(size) for size in tensor.shape])
        for number, tensor in enumerate(weights.values())
    ]
    return total(parts)


def stepped(weights, seed, share=0.01):
    """The weights after a step that changes a share of `b` and `c`, and nothing else."""
    g = torch.Generator().manual_seed(seed)
    found = dict(weights)
    for name in ("b", "c"):
        flat = weights[name].contiguous().view(-1).clone()
        places = (torch.rand(flat.shape, generator=g) < share).nonzero().flatten()
        flat[places] += flat[places].abs() * 0.01 + 1e-3
        found[name] = flat.view(weights[name].shape)
    return found


def equal(held, weights):
    return all(torch.equal(held.weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("codec", ["absolute", "ulp"])
def test_updates_of_changes_are_a_whole_update_bit_for_bit(spec, codec):  # noqa: F811
    senders, receivers = joined(spec(world_size=3, deltas=codec, anchor_every=3), receivers=2)
    weights, sizes = tensors(), []
    held = [Held(weights), Held(weights)]
    for version in range(1, 10):
        sent, *taken = update(senders, receivers, held, weights, version)
        assert taken == [sent, sent] and equal(held[0], weights) and equal(held[1], weights)
        assert senders[0].values == {0: digest_of(weights)}
        sizes.append(senders[0].bytes)
        weights = stepped(weights, version)
    whole = sum(bucket.nbytes for bucket in buckets(plan_of(weights), 1))
    assert [size == whole for size in sizes] == [True, False, False, False] * 2 + [True]
    assert max(size for size in sizes if size != whole) < 0.05 * whole


def test_nothing_is_sent_where_nothing_changed_and_all_where_much_did(spec):  # noqa: F811
    senders, receivers = joined(spec(deltas="ulp"))
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


def test_three_senders_send_changes_of_their_own_parts(spec):  # noqa: F811
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
def test_changes_of_a_version_that_a_receiver_does_not_hold_are_refused(spec, holds):  # noqa: F811
    senders, receivers = joined(spec(deltas="absolute"))
    weights = tensors()
    held = Held(weights)
    for version in (1, 2):
        update(senders, receivers, [held], weights, version)
    before = {name: tensor.clone() for name, tensor in held.weights.items()}
    held.version = holds
    _, error = update(senders, receivers, [held], stepped(weights, 0), 3)
    assert f"expected changes of version {holds} or all values, found those of 2" in str(error)
    assert equal(held, before)


@pytest.mark.slow
def test_a_flipped_bit_in_changes_is_noticed_before_one_is_written(spec):  # noqa: F811
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
    assert "bucket 0 of 3: expected digest" in str(error) and equal(held, weights)


def test_a_new_connection_begins_with_all_values(spec):  # noqa: F811
    connection = spec(deltas="ulp")
    weights = tensors()
    for name in ("first", "second"):
        senders, receivers = joined(replace(connection, group=name))
        held = Held(weights)
        assert update(senders, receivers, [held], weights, 1)[1] and set(held.kinds) == {"Values"}
        update(senders, receivers, [held], stepped(weights, 0), 2)
        assert set(held.kinds) == {"Changes"}

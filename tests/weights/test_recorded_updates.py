"""Updates of changes that an optimizer recorded: what receivers hold, what is sent whole, and what is noticed."""

import pytest
from recorded import stepped, write
from transfers import Held, digest_of, equal, joined, plan_of, tensors, update

from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.plan import buckets

WATCHED = {"all": ("a", "b", "scalar", "c"), "the largest": ("c",), "none": ()}
WHOLE = sum(bucket.nbytes for bucket in buckets(plan_of(tensors()), 1))


class Sending:
    """A sender whose weights an optimizer changes, and a receiver."""

    def __init__(self, connection, watched="all"):
        [self.sender], [self.groups] = joined(connection)
        self.weights, self.written = tensors(), ChangeRecord()
        self.held = Held(self.weights)
        self.written.want(True)
        self.written.forget()
        self.memory = {name: w.t() if name == "c" else w for name, w in self.weights.items()}
        for name in WATCHED[watched]:
            self.written.watch(self.memory[name])

    def step(self, seed, share=0.01):
        self.written.begin_step()
        for number, shard in enumerate(self.memory.values()):
            new = stepped(shard, share, 100 * seed + number)
            if self.written.covers(shard):
                write(self.written, shard, new, chunk=1 << 16)
            else:
                shard.copy_(new)

    def update(self, version):
        """What was sent and what was taken: digests, or errors."""
        found = update([self.sender], [self.groups], [self.held], self.weights, version, self.written)
        self.written.forget()
        return found

    def check(self, version):
        sent, taken = self.update(version)
        assert sent == taken and equal(self.held, self.weights), (sent, taken)
        assert self.sender.values == {0: digest_of(self.weights)}
        return self.sender.bytes


@pytest.mark.parametrize("watched", list(WATCHED))
def test_recorded_changes_are_a_whole_update_bit_for_bit(spec, watched):
    sides = Sending(spec(deltas="absolute"), watched)
    sizes = []
    for version in range(1, 6):
        sizes.append(sides.check(version))
        sides.step(version)
    assert [size == WHOLE for size in sizes] == [True, False, False, False, False]
    assert max(size for size in sizes if size != WHOLE) < 0.05 * WHOLE
    copies = sides.sender._copies.values()
    kept = sum(copy.numel() for copy in copies)
    assert kept == {"all": 0, "none": WHOLE + 8 * len(copies)}.get(watched, kept)
    assert watched != "the largest" or 0 < kept < 0.7 * WHOLE, "copies of the others"


def test_what_is_not_recorded_is_sent_whole(spec):
    sides = Sending(spec(deltas="absolute"))
    sides.check(1)
    sides.step(1)
    assert sides.check(2) < 0.05 * WHOLE
    sides.step(2)
    sides.step(3)
    assert sides.check(3) < 0.1 * WHOLE, "two steps"
    sides.step(4)
    assert sides.check(4) < 0.05 * WHOLE
    sides.written.lose()
    sides.weights["b"].mul_(3)
    assert sides.check(5) == WHOLE, "a checkpoint was loaded"
    sides.step(5, share=0.5)
    assert sides.check(6) > 0.99 * WHOLE, "most elements changed"
    assert sides.check(7) == 0, "nothing changed"


def test_a_value_that_changed_without_a_record_is_in_the_digest_of_the_next_update(spec):
    sides = Sending(spec(deltas="absolute"))
    for version in (1, 2):
        sides.check(version)
        sides.step(version)
    sides.memory["c"][3, 7] += 1
    sent, taken = sides.update(3)
    assert sent == taken and not equal(sides.held, sides.weights)
    assert sides.sender.values == {0: digest_of(sides.weights)} != {0: digest_of(sides.held.weights)}

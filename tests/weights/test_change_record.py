"""Changes that an optimizer recorded, as parts of the weights have them: equal to those that a comparison finds."""

import pytest
import torch
from recorded import stepped, write

from megatron_scalerl.weights.change_record import ChangeRecord
from megatron_scalerl.weights.changes import bits_of, find

SHAPE = (48, 30)
VIEWS = {
    "all": lambda w: w,
    "one row": lambda w: w[7:8],
    "rows": lambda w: w[5:31],
    "columns": lambda w: w[:, 4:19],
    "one column": lambda w: w[:, 29:],
    "rows and columns": lambda w: w[3:40, 2:27],
    "transposed": lambda w: w.t(),
    "part of a transposed": lambda w: w.t()[3:9, 1:47],
    "one expert of a fused tensor": lambda w: w.t().unsqueeze(0)[:, 2:20],
    "blocks of rows": lambda w: w.view(6, 8, 30)[:, 2:5],
    "every third row": lambda w: w[::3, 1:],
    "flat": lambda w: w.view(-1)[100:777],
    "a value": lambda w: w[5, 6],
}


def known(recorder, view):
    """What is recorded of a view; None if that is not all."""
    [found] = recorder.changes_of([view])
    return found


def check(recorder, view, before, name):
    """What is recorded of a view is what a comparison with the values before finds."""
    expected = find(bits_of(before.contiguous().view(-1).clone()), view)
    found = known(recorder, view)
    for column in ("positions", "bits"):
        assert torch.equal(getattr(found, column), getattr(expected, column)), (name, column)


@pytest.fixture
def recorder():
    written = ChangeRecord()
    written.want(True, [torch.zeros(1)])  # nothing that other ranks write
    written.forget()
    return written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.9])
def test_changes_of_a_part_are_those_that_a_comparison_finds(recorder, dtype, share):
    memory = torch.randn(3 * 48 * 30 + 1).to(dtype)
    shards = [memory[first : first + 48 * 30].view(SHAPE) for first in (2881, 1, 1441)]
    for shard in shards:
        recorder.watch(shard)
    before = [shard.clone() for shard in shards]
    recorder.begin_step()
    for number, shard in enumerate(shards):
        write(recorder, shard, stepped(shard, share, number))
    for old, shard in zip(before, shards):
        assert share == 0 or not torch.equal(shard, old)
        for name, view_of in VIEWS.items():
            view = view_of(shard)
            assert recorder.covers(view), name
            check(recorder, view, view_of(old), name)


def test_changes_of_parts_that_several_shards_make_up(recorder):
    weights = torch.randn(SHAPE)
    flat, before = weights.view(-1), weights.clone()
    cuts = [(0, 700), (700, 703), (703, 1440)]
    for first, end in reversed(cuts):
        recorder.watch(flat[first:end])
    recorder.begin_step()
    for first, end in cuts:
        write(recorder, flat[first:end], stepped(flat[first:end], 0.3, first))
    for name, view_of in VIEWS.items():
        view = view_of(weights)
        check(recorder, view, view_of(before), name)


def test_changes_of_several_steps_are_those_from_the_first_values_to_the_last(recorder):
    weights = torch.randn(SHAPE).bfloat16()
    recorder.watch(weights)
    before = weights.clone()
    for seed in range(3):
        recorder.begin_step()
        write(recorder, weights, stepped(weights, 0.03, seed))
        for name in ("rows", "columns", "transposed"):  # asked for in between, too
            view = VIEWS[name](weights)
            check(recorder, view, VIEWS[name](before), name)


def test_what_is_not_all_in_shards_is_not_covered(recorder):
    memory = torch.randn(100)
    recorder.watch(memory[10:50])
    recorder.watch(memory[50:90])
    covered = [recorder.covers(memory[a:b]) for a, b in ((10, 50), (60, 90), (9, 20), (40, 60), (80, 91), (0, 5))]
    assert covered == [True, True, False, True, False, False]
    assert not recorder.covers(memory[10:50].view(torch.int32)), "another type"
    assert not recorder.covers(memory[10:40].as_strided((10, 10), (2, 1))), "elements that are there twice"
    assert known(recorder, memory[40:95]) is None and not ChangeRecord().covers(memory)


def test_what_another_rank_wrote_is_known_where_it_was_asked_for(recorder):
    weights = torch.zeros(100)
    for first in (0, 50):
        recorder.watch(weights[first : first + 50], of_another=True)
    recorder.want(True, [weights[60:70]])
    recorder.begin_step()
    assert [recorder.needs(weights[first : first + 50]) for first in (0, 50)] == [False, True]
    write(recorder, weights[50:], stepped(weights[50:], 0.3, 0))
    assert known(recorder, weights[50:]).positions.numel() and known(recorder, weights[:50]) is None
    assert known(recorder, weights) is None


def test_more_than_one_in_eight_is_unknown(recorder):
    weights = torch.zeros(1 << 18)
    recorder.watch(weights)
    recorder.begin_step()
    write(recorder, weights, stepped(weights, 0.2, 0), chunk=1 << 16)
    assert known(recorder, weights[:5]) is None
    recorder.forget()
    assert known(recorder, weights).positions.numel() == 0


def test_changes_are_known_since_the_last_update_and_of_the_optimizer_alone(recorder):
    weights = torch.zeros(1000)
    recorder.watch(weights)

    def step():
        recorder.begin_step()
        write(recorder, weights, stepped(weights, 0.05, 1))

    step()
    assert known(recorder, weights).positions.numel()
    recorder.lose()
    assert known(recorder, weights) is None, "a checkpoint was loaded"
    recorder.forget()
    assert known(recorder, weights).positions.numel() == 0
    recorder.want(False)
    step()
    assert known(recorder, weights) is None, "nothing was recorded"
    recorder.want(True)
    assert known(recorder, weights) is None, "... nor then"
    recorder.forget()
    step()
    assert known(recorder, weights).positions.numel()

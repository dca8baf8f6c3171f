"""What is checked of a batch before anything is queued: ids, and that ranks which share a batch hold the same."""

from dataclasses import replace

import numpy as np
import pytest
from random_policy import batches_of, random_samples

from megatron_scalerl.trainer.agreement import _digest, agree, check_tokens


def rows():
    [batch] = batches_of(random_samples(1), micro_batch_tokens=64)
    return list(batch.micro_batches)


def changed(m, name, place, value):
    array = getattr(m, name).copy()
    array[place] = value
    return replace(m, **{name: array})


def test_ids_outside_the_vocabulary_are_named_but_for_targets_without_loss():
    first, second, *_ = rows()
    check_tokens([first, second], 64)
    with pytest.raises(ValueError, match=r"micro-batch 1: tokens: id 64 at position 3 .* 64 ids"):
        check_tokens([first, changed(second, "tokens", 3, 64)], 64)
    place = int(np.flatnonzero(second.loss_mask)[2])
    with pytest.raises(ValueError, match=rf"targets: id -1 at position {place} .*of 1 invalid ids\)"):
        check_tokens([first, changed(second, "targets", place, -1)], 64)
    without_loss = int(np.flatnonzero(~first.loss_mask)[0])
    check_tokens([changed(first, "targets", without_loss, 999)], 64)


def test_the_digest_sees_every_array_and_the_order():
    given = rows()
    known = _digest(given)
    assert 0 <= known < 2**63 and known == _digest(rows()) and known != _digest(given[::-1])
    for name in ("tokens", "position_ids", "targets", "rollout_logprobs", "advantages", "token_weights", "staleness"):
        assert _digest([changed(given[0], name, 0, 1 + getattr(given[0], name)[0]), *given[1:]]) != known, name
    choices = np.zeros((len(given[0].tokens), 2, 1), dtype=np.int32)
    assert _digest([replace(given[0], expert_choices=choices), *given[1:]]) != known


@pytest.mark.parametrize(
    "facts, message",
    [
        ([0, 7, 2, 11], None),
        ([1, 7, 2, 99], None),  # another data-parallel rank: another batch
        ([0, 7, 2, 99], "rank 1 and rank 0 .* both are data-parallel rank 0"),
        ([1, 7, 3, 11], "rank 1 has 3 .* step 7, but rank 0 has 2 .* step 7"),
        ([1, 8, 2, 11], "rank 1 has 2 .* step 8, but rank 0 has 2 .* step 7"),
    ],
)
def test_ranks_that_differ_are_named(facts, message, new_trainer, monkeypatch):
    """The exchange is a stand-in that brings another rank's facts; real ranks agree in every distributed test."""
    given = rows()[:2]
    facts = [_digest(given) if value == 11 else value for value in facts]

    def gather(everyone, mine):
        everyone[: len(mine)] = mine
        everyone[len(mine) :] = mine.new_tensor(facts)

    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", gather)
    parallel = replace(new_trainer().parallel, world_size=2)
    if message is None:
        agree(given, parallel, step=7)
        return
    with pytest.raises(RuntimeError, match=message):
        agree(given, parallel, step=7)

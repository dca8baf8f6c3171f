"""Packing: every sample exactly once, weights preserved, equal counts, and the wire form."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout

from megatron_scalerl.batching.packing import pack, pad_to, real_tokens, scoring_micro_batches
from megatron_scalerl.types import ExpertChoices, MicroBatch, Sample

COLUMNS = [f.name for f in fields(MicroBatch) if f.name not in ("cu_seqlens", "expert_choices", "columns")]


def sample(prompt=(1, 2, 3), *, advantage=0.5, weight=0.25, **kw):
    return Sample(prompt_token_ids=tuple(prompt), rollout=rollout(**kw), advantage=advantage, token_weight=weight)


def pack_all(samples, **kw):
    options = {"step": 4, "dp_size": 1, "micro_batch_tokens": 64, "pad_multiple": 1, "policy_version": 3}
    return pack(samples, **{**options, **kw})


def test_longest_first_and_first_fit():
    lengths = [4, 9, 5, 12, 3]  # completion lengths, prompts of 1
    samples = [sample((1,), tokens=tuple(range(n - 1))) for n in lengths]
    [batch] = pack_all(samples, micro_batch_tokens=16)
    assert [np.diff(mb.cu_seqlens).tolist() for mb in batch.micro_batches] == [[12, 4], [9, 5], [3]]


def test_ranks_are_balanced_and_fillers_weigh_nothing():
    samples = [sample((1,), tokens=tuple(range(n - 1))) for n in (16, 9, 8)]
    first, second = pack_all(samples, dp_size=2, micro_batch_tokens=16, pad_multiple=4)
    assert [np.diff(mb.cu_seqlens).tolist() for mb in first.micro_batches] == [[16], [4]]
    assert [np.diff(mb.cu_seqlens).tolist() for mb in second.micro_batches] == [[9, 3], [8]]
    filler = first.micro_batches[1]
    assert not filler.loss_mask.any() and not filler.token_weights.any()
    assert (real_tokens(first), real_tokens(second)) == (16, 17)


def test_a_sequence_with_one_loss_token_counts_whole_and_one_without_does_not():
    one = sample((1, 2), tokens=(7, 8, 9), mask=(False, True, False))
    none = sample((1, 2), tokens=(7, 8), mask=(False, False))
    [batch] = pack_all([one, none])
    assert real_tokens(batch) == 5


def test_a_sample_over_the_capacity_is_refused():
    with pytest.raises(ValueError, match=r"trainer.micro_batch_tokens is 5; sample 1 needs at least 6"):
        pack_all([sample((1,), tokens=(1, 2)), sample((1, 2, 3), tokens=(7, 8, 9))], micro_batch_tokens=5)


samples_strategy = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.booleans(), min_size=1, max_size=24), st.floats(0.001, 1)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    specs=samples_strategy,
    dp_size=st.integers(1, 4),
    micro_batch_tokens=st.integers(32, 80),
    pad_multiple=st.sampled_from([1, 2, 4, 8]),
)
def test_every_sample_once_weights_kept_equal_counts(specs, dp_size, micro_batch_tokens, pad_multiple):
    samples = []
    for number, (prompt, mask, weight) in enumerate(specs):
        ids = tuple(100 + number for _ in mask)
        samples.append(sample((1000 + number,) * prompt, tokens=ids, mask=mask, weight=weight, advantage=number))
    batches = pack_all(samples, dp_size=dp_size, micro_batch_tokens=micro_batch_tokens, pad_multiple=pad_multiple)
    assert len(batches) == dp_size
    assert len({len(b.micro_batches) for b in batches}) == 1
    found = []
    for mb in (m for b in batches for m in b.micro_batches):
        size = len(mb.tokens)
        assert size % pad_multiple == 0 and size < micro_batch_tokens + pad_multiple
        assert {len(getattr(mb, column)) for column in COLUMNS} == {size}
        assert mb.cu_seqlens[0] == 0 and mb.cu_seqlens[-1] == size and (np.diff(mb.cu_seqlens) > 0).all()
        for start, end in zip(mb.cu_seqlens[:-1], mb.cu_seqlens[1:]):
            assert mb.position_ids[start:end].tolist() == list(range(end - start))
            assert mb.targets[start : end - 1].tolist() == mb.tokens[start + 1 : end].tolist()
            assert not mb.loss_mask[end - 1]
            if mb.tokens[start] >= 1000:
                found.append(mb.tokens[start] - 1000)
    assert sorted(found) == list(range(len(samples)))
    every = [m for b in batches for m in b.micro_batches]
    total = sum(float(m.token_weights.sum(dtype=np.float64)) for m in every)
    assert total == pytest.approx(sum(s.token_weight * sum(s.rollout.loss_mask) for s in samples), rel=1e-5)
    per_sample = {
        n: sum(float(m.token_weights[(m.advantages == n) & m.loss_mask].sum(dtype=np.float64)) for m in every)
        for n in range(len(samples))
    }
    for number, s in enumerate(samples):
        assert per_sample[number] == pytest.approx(s.token_weight * sum(s.rollout.loss_mask), rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=4, max_size=40), dp_size=st.integers(2, 4))
def test_loads_differ_by_at_most_the_longest_sample(lengths, dp_size):
    samples = [sample((1,), tokens=tuple(range(n - 1))) for n in lengths]
    loads = [real_tokens(b) for b in pack_all(samples, dp_size=dp_size)]
    assert max(loads) - min(loads) <= max(lengths)


def test_expert_choices_lie_beside_their_tokens_and_nowhere_else():
    experts = np.arange(2 * 3 * 2, dtype="<u2").reshape(2, 3, 2) + 300  # prompt of 1, completion of 2: 2 seen tokens
    brought = ExpertChoices(layers=3, topk=2, width=2, data=experts.tobytes())
    first = sample((1,), tokens=(5, 6))
    first = replace(first, rollout=replace(first.rollout, expert_choices=brought))
    [batch] = pack_all([first, sample((4,), tokens=(7,))], pad_multiple=8)
    found = batch.micro_batches[0].expert_choices
    assert found.shape == (8, 3, 2) and found.dtype == np.int32
    assert found[:2].tolist() == experts.tolist()
    assert (found[2:] == -1).all()


def test_scoring_keeps_the_order_and_marks_every_target():
    lists = [(5, 6, 7), (8, 9), tuple(range(10, 20)), (3, 4, 5, 6), (3, 4, 5)]
    rows = scoring_micro_batches(lists, micro_batch_tokens=6, pad_multiple=2)
    assert [np.diff(mb.cu_seqlens).tolist() for mb in rows] == [[3, 2, 1], [10], [4], [3, 1]]
    targets = np.concatenate([mb.targets[mb.loss_mask] for mb in rows])
    assert targets.tolist() == [t for ids in lists for t in ids[1:]]


def test_scoring_rows_carry_no_weight_no_advantage_and_no_age():
    [row] = scoring_micro_batches([(5, 6, 7)], micro_batch_tokens=6, pad_multiple=4)
    for column in ("token_weights", "advantages", "rollout_logprobs"):
        assert getattr(row, column).tolist() == [0.0] * 4
    assert row.staleness.tolist() == [0, 0, -1, -1]


def test_a_micro_batch_is_not_padded_to_fewer_positions():
    [row] = scoring_micro_batches([(5, 6, 7)], micro_batch_tokens=6, pad_multiple=1)
    assert pad_to(row, 3) is row
    with pytest.raises(AssertionError):
        pad_to(row, 2)


def test_a_single_token_cannot_be_scored():
    with pytest.raises(AssertionError, match="no position predicts the first token"):
        scoring_micro_batches([(5, 6), (7,)], micro_batch_tokens=6, pad_multiple=1)

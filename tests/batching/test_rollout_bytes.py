"""Completions in bytes: exact both ways, eight bytes a token, and nothing but such bytes is read."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout

from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, read, rollout_of, write
from megatron_scalerl.types import ExpertChoices, Rollout


@st.composite
def rollouts(draw):
    size = draw(st.integers(1, 40))
    floats = st.floats(-9998, 0, width=draw(st.sampled_from([32, 64])))
    experts = None
    if draw(st.booleans()):
        layers, topk, width = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))
        count = (draw(st.integers(1, 4)) + size - 1) * layers * topk * width
        experts = ExpertChoices(
            layers=layers, topk=topk, width=width, data=draw(st.binary(min_size=count, max_size=count))
        )
    return Rollout(
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))),
        rollout_logprobs=tuple(draw(st.lists(floats, min_size=size, max_size=size))),
        policy_versions=tuple(sorted(draw(st.lists(st.integers(0, 2**62), min_size=size, max_size=size)))),
        loss_mask=tuple(draw(st.lists(st.booleans(), min_size=size, max_size=size))),
        interrupted=draw(st.booleans()),
        truncated=draw(st.booleans()),
        thinking_cut=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.integers(0, 2**31 - 1)),
        expert_choices=experts,
    )


def plain(tokens=1000, **changes):
    values = np.random.default_rng(1).normal(-1, 0.1, tokens).astype(np.float32)
    fields = {"tokens": range(tokens), "logprobs": values.tolist(), "versions": (3,) * tokens}
    return rollout(**fields | changes)


@given(rollouts())
@settings(max_examples=200, deadline=None)
def test_reading_returns_what_was_written(made):
    data = write(made)
    assert rollout_of(read(data)) == made
    assert write(read(memoryview(data))) == data
    assert rollout_of(arrays_of(made)) == made


def test_a_token_takes_eight_bytes_at_most_nine_with_versions_and_forced_ranges():
    assert len(write(plain(14_336))) == 14_336 * 8 + 52
    busy = plain(versions=[i // 112 for i in range(1000)], mask=[not 500 <= i < 520 for i in range(1000)])
    assert len(write(busy)) <= 9 * 1000


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_refused_or_are_another_completion_of_the_same_size(data):
    whole = write(data.draw(rollouts()))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match=r"^rollout: "):
        read(whole[:cut])
    with pytest.raises(ValueError, match=r"^rollout: "):
        read(whole + b"\0")
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        arrays = read(bytes(flipped))
    except ValueError as error:
        assert str(error).startswith("rollout: ")
    else:
        sizes = {len(getattr(arrays, f.name)) for f in dataclasses.fields(arrays)[:4]}
        assert sizes == {len(arrays.token_ids)} and len(write(arrays)) <= len(whole) + 8 * len(whole)


def test_random_bytes_are_refused():
    generator = np.random.default_rng(0)
    for size in (0, 1, 39, 40, 41, 200, 5000):
        with pytest.raises(ValueError, match=r"^rollout: "):
            read(generator.bytes(size))


def test_the_facts_count_sampled_tokens_and_their_log_probs():
    made = plain(4, versions=(3, 3, 4, 5), mask=(True, True, False, True), logprobs=(-1, -2, 0, -4))
    facts = facts_of(arrays_of(made))
    assert (facts.tokens, facts.sampled_tokens, facts.logprob_sum) == (4, 3, -7.0)
    assert (facts.first_version, facts.last_version) == (3, 5)

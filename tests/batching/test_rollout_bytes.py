"""Completions in bytes: exact both ways, eight bytes a token, and nothing but such bytes is read."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout
from stored_episodes import BEFORE, EPISODE, FORKED

from megatron_scalerl.batching.rollout_bytes import (
    arrays_of,
    facts_of,
    facts_of_parts,
    joined_parts,
    read,
    rollout_of,
    write,
)
from megatron_scalerl.types import ExpertChoices, Part, Rollout


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
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    bounds = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
    environment = tuple(zip(bounds[::2], bounds[1::2]))
    for start, end in environment:
        mask[start:end] = [False] * (end - start)
    return Rollout(
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))),
        rollout_logprobs=tuple(draw(st.lists(floats, min_size=size, max_size=size))),
        policy_versions=tuple(sorted(draw(st.lists(st.integers(0, 2**62), min_size=size, max_size=size)))),
        loss_mask=tuple(mask),
        interrupted=draw(st.booleans()),
        truncated=draw(st.booleans()),
        thinking_cut=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.integers(0, 2**31 - 1)),
        expert_choices=experts,
        environment=environment,
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


def test_the_bytes_of_a_completion_without_an_environment_are_those_of_before():
    golden = bytes.fromhex(
        "01010000040000000200000001000000020000000b0000000000000000000000000000000000000003000000000000000300000004"
        "0000000000000001000000020000000300000005000000060000000700000008000000000000bf000080be00000000000080bf"
    )
    assert write(BEFORE) == golden and rollout_of(read(golden)) == BEFORE


def test_a_range_of_the_environment_takes_eight_bytes_more():
    bare = write(dataclasses.replace(EPISODE, environment=()))
    data = write(EPISODE)
    assert (data[2], bare[2]) == (2, 0) and len(data) == len(bare) + 16
    assert data[3:40] == bare[3:40]
    place = 40 + 2 * 12 + 2 * 8  # behind the header, two versions, two ranges without loss
    assert np.frombuffer(data, "<u4", 4, place).tolist() == [3, 5, 7, 8]
    assert data[:2] + b"\0\0" + data[4:place] + data[place + 16 :] == bare


@pytest.mark.parametrize(
    "ranges, said",
    [
        ([[7, 8], [3, 5]], r"the ranges \[7, 8, 3, 5\] do not ascend within 11 tokens"),
        ([[3, 4], [4, 5]], r"the ranges \[3, 4, 4, 5\] do not ascend within 11 tokens"),
        ([[3, 3]], r"the ranges \[3, 3\] do not ascend"),
        ([[3, 12]], r"the ranges \[3, 12\] do not ascend within 11 tokens"),
        ([[2, 6]], r"the loss mask has tokens that the environment wrote: \[\[2, 6\]\]"),
    ],
)
def test_ranges_of_the_environment_ascend_and_carry_no_loss(ranges, said):
    data = write(dataclasses.replace(arrays_of(EPISODE), environment=np.array(ranges)))
    with pytest.raises(ValueError, match=f"^rollout: {said}"):
        read(data)


def test_the_facts_count_turns_and_what_the_environment_wrote():
    facts = facts_of(arrays_of(EPISODE))
    assert (facts.turns, facts.environment_tokens, facts.parts) == (3, 3, ())
    assert (facts.tokens, facts.generated_tokens, facts.sampled_tokens, facts.logprob_sum) == (11, 8, 6, -4.625)
    assert facts.samples == (Part(tokens=11, sampled_tokens=6),)
    alone = facts_of(arrays_of(plain(4)))
    assert (alone.turns, alone.environment_tokens, alone.generated_tokens) == (1, 0, 4)
    # a message at the end begins no turn, nor does a history at the begin
    ended = rollout(tokens=range(4), mask=(False, True, False, False), environment=((0, 1), (2, 4)))
    assert facts_of(arrays_of(ended)).turns == 1


def test_the_facts_of_a_forked_episode_are_sums_over_its_parts():
    facts = facts_of_parts([arrays_of(part) for part in FORKED])
    assert facts.parts == facts.samples
    assert [(part.tokens, part.sampled_tokens) for part in facts.parts] == [(3, 1), (5, 2), (8, 3)]
    assert (facts.tokens, facts.sampled_tokens, facts.logprob_sum) == (16, 6, -4.625)
    assert (facts.turns, facts.environment_tokens, facts.generated_tokens) == (3, 8, 8)
    assert (facts.first_version, facts.last_version) == (3, 4)
    assert (facts.interrupted, facts.truncated) == (True, False)
    cut = [arrays_of(dataclasses.replace(part, truncated=number != 1)) for number, part in enumerate(FORKED)]
    assert facts_of_parts(cut).truncated and not facts_of_parts(cut[:2]).truncated


def test_versions_of_a_forked_episode_are_those_of_sampled_tokens():
    first = rollout(tokens=(1, 2), mask=(True, False), versions=(3, 3))
    last = rollout(tokens=(1, 2, 9), mask=(False, True, False), versions=(2, 4, 9), environment=((0, 1), (2, 3)))
    facts = facts_of_parts([arrays_of(first), arrays_of(last)])
    assert (facts.first_version, facts.last_version) == (3, 4)


def test_parts_that_were_sampled_side_by_side():
    """The first part ended first, and began last; both are one turn each without anything between."""
    first = rollout(tokens=(1, 2), mask=(True, True), versions=(4, 5))
    last = rollout(tokens=(3,), mask=(True,), versions=(3,))
    facts = facts_of_parts([arrays_of(first), arrays_of(last)], [None, 2])
    assert (facts.first_version, facts.last_version, facts.turns) == (3, 5, 2)
    assert [part.prompt_tokens for part in facts.parts] == [None, 2]


def test_an_episode_that_begins_with_a_part_of_the_prompt_is_a_part():
    one = arrays_of(rollout(tokens=(1, 2), mask=(False, True), versions=(4, 4), environment=((0, 1),)))
    assert facts_of_parts([one], [None]).parts == ()
    assert facts_of_parts([one], [3]).parts == (Part(tokens=2, sampled_tokens=1, prompt_tokens=3),)


def test_parts_are_joined_with_their_ranges():
    whole = rollout_of(joined_parts([arrays_of(part) for part in FORKED]))
    assert whole.token_ids == sum((part.token_ids for part in FORKED), ())
    assert whole.environment == ((3, 6), (8, 13)) and whole.loss_mask.count(True) == 6
    assert rollout_of(joined_parts([arrays_of(EPISODE)])) == EPISODE

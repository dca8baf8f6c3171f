"""A batch on the wire: the same columns as ever, few bytes, and nothing else is accepted."""

import random
from dataclasses import replace
from types import SimpleNamespace

import batch_messages
import msgspec
import numpy as np
import pytest
from batch_messages import frames_of, planned
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout

from megatron_scalerl.batching.packing import build, pack
from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.batch_frames import BatchFrames, checked
from megatron_scalerl.trainer.messages import InvalidMessage
from megatron_scalerl.types import ExpertChoices, Sample


def drawn(seed, *, experts):
    """Samples with forced ranges, mixed versions, log-probs of either width, experts for some of them."""
    rng, samples = random.Random(seed), []
    for _ in range(rng.randint(1, 14)):
        prompt, size = rng.randint(1, 9), rng.randint(1, 40)
        start, end = sorted(rng.choices(range(size + 1), k=2))
        wide = rng.random() < 0.5
        logprobs = [-rng.random() * 9 for _ in range(size)]
        made = rollout(
            tokens=[rng.randrange(2**31) for _ in range(size)],
            mask=[not start <= i < end for i in range(size)],
            versions=sorted(rng.randint(0, 3) for _ in range(size)),
            logprobs=logprobs if wide else np.float32(logprobs).tolist(),
        )
        if experts and rng.random() < 0.7:
            width = rng.choice([1, 2])
            data = rng.randbytes((prompt + size - 1) * 3 * 2 * width)
            made = replace(made, expert_choices=ExpertChoices(layers=3, topk=2, width=width, data=data))
        ids = tuple(rng.randrange(2**31) for _ in range(prompt))
        weight, advantage = rng.random(), rng.gauss(0, 1)
        samples.append(Sample(prompt_token_ids=ids, rollout=made, advantage=advantage, token_weight=weight))
    return samples


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), dp_size=st.integers(1, 4), pad=st.sampled_from([1, 2, 8]), experts=st.booleans())
def test_the_columns_built_from_frames_are_the_samples_to_the_bit(seed, dp_size, pad, experts):
    samples = drawn(seed, experts=experts)
    plan = planned(samples, dp_size=dp_size)
    local = pack(samples, step=4, dp_size=dp_size, micro_batch_tokens=64, pad_multiple=pad, policy_version=3)
    assert sorted(i for numbers in plan.numbers for i in numbers) == list(range(len(samples)))
    for dp_rank in range(dp_size):
        held = checked(frames_of(plan, samples, dp_rank))
        batch = build(held.plan, held.completions, pad_multiple=pad)
        assert batch.step == 4 and len(batch.micro_batches) == len(local[dp_rank].micro_batches)
        left = iter(plan.numbers[dp_rank])
        for members, found, ours in zip(
            plan.ranks[dp_rank].micro_batches, batch.micro_batches, local[dp_rank].micro_batches, strict=True
        ):
            used = [samples[next(left)] for _ in members]
            size = -(-sum(s.length for s in members) // pad) * pad or pad
            expected = batch_messages.columns(used, size, policy_version=3)
            batch_messages.same(found, expected)
            batch_messages.same(ours, expected)


def test_a_token_takes_less_than_fourteen_bytes():
    rng = random.Random(0)
    samples = []
    for _ in range(16):
        made = rollout(
            tokens=[rng.randrange(128_000) for _ in range(1000)],
            mask=[not 700 <= i < 720 for i in range(1000)],
            versions=[i // 125 for i in range(1000)],
            logprobs=np.float32([-rng.random() for _ in range(1000)]).tolist(),
        )
        prompt = tuple(rng.randrange(128_000) for _ in range(200))
        samples.append(Sample(prompt_token_ids=prompt, rollout=made, advantage=0.3, token_weight=1e-6))
    frames = frames_of(planned(samples, micro_batch_tokens=4096), samples)
    assert sum(map(len, frames)) < 14 * 16 * 1000 < 41 * 16 * 1200


def two():
    samples = [
        Sample(prompt_token_ids=(1, 2), rollout=rollout(), advantage=1.0, token_weight=0.5),
        Sample(prompt_token_ids=(3,), rollout=rollout(tokens=(4, 5)), advantage=-1.0, token_weight=0.5),
    ]
    return samples, frames_of(planned(samples), samples)


def with_plan(frames, **changes):
    """The frames with another plan."""
    message = messages.decode_for_rank(frames)
    return [messages.encode(msgspec.structs.replace(message, plan=replace(message.plan, **changes))), *frames[1:]]


def with_first(frames, made):
    """The frames with another first completion, of the size stated."""
    message, data = messages.decode_for_rank(frames), write(made)
    return [
        messages.encode(msgspec.structs.replace(message, sizes=(len(data), *message.sizes[1:]))),
        data,
        *frames[2:],
    ]


def bad_batches():
    samples, frames = two()
    [members] = planned(samples).ranks[0].micro_batches
    first, second = members
    raw = msgspec.msgpack.decode(frames[0])
    where = r"^batch of step 4: "
    longer = r" completion 0: 4 tokens .* 3$"
    return {
        "no frame": ([], "without a frame"),
        "a completion missing": (frames[:-1], where + "1 completions and 2 sizes .* 2$"),
        "a completion too many": ([*frames, frames[1]], where + "3 completions and 2 sizes .* 2$"),
        "no completions": (frames[:1], where + "0 completions and 2 sizes .* 2$"),
        "a completion cut": ([frames[0], frames[1][:-1], frames[2]], where + "completion 0 has 75 bytes, .* 76$"),
        "completions exchanged": ([frames[0], *frames[:0:-1]], where + "completion 0 has 68 bytes, .* 76$"),
        "another completion": (with_first(frames, rollout(tokens=(1, 2, 3, 4))), where[:-1] + longer),
        "a damaged completion": (
            [frames[0], b"\x09" + frames[1][1:], frames[2]],
            where + "completion 0: rollout: format 9 .* 1$",
        ),
        "a length without tokens": (
            with_plan(frames, micro_batches=((replace(first, tokens=2**60), second),)),
            where + "completion 0: 3 tokens .* 1152921504606846976$",
        ),
        "a negative length": (
            with_plan(frames, micro_batches=((replace(first, tokens=-3), second),)),
            where + "completion 0: 3 tokens .* -3$",
        ),
        "one sample fewer": (with_plan(frames, micro_batches=((first,),)), where + "2 completions and 2 sizes .* 1$"),
        "text for a number": (
            [msgspec.msgpack.encode(raw | {"plan": raw["plan"] | {"step": "4"}}), *frames[1:]],
            "bytes that have arrived are no message",
        ),
        "another message with frames": (
            [messages.encode(messages.Step(call=1, step=4)), *frames[1:]],
            "^the message has 3 frames",
        ),
    }


@pytest.mark.parametrize("name", bad_batches())
def test_other_batches_are_refused_in_one_line(name):
    frames, error = bad_batches()[name]
    with pytest.raises(InvalidMessage, match=error) as caught:
        checked(frames)
    assert "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), frame=st.integers(0, 2))
def test_a_flipped_bit_is_refused_or_another_batch_of_the_same_size(place, bit, frame):
    _, frames = two()
    damaged = bytearray(frames[frame])
    damaged[place % len(damaged)] ^= 1 << bit
    frames[frame] = bytes(damaged)
    try:
        held = checked(frames)
    except InvalidMessage as error:
        assert "\n" not in str(error)
    else:
        batch = build(held.plan, held.completions, pad_multiple=1)
        assert sum(len(m.tokens) for m in batch.micro_batches) <= sum(map(len, frames))


def rank(*, holds_batch=True):
    """What one rank keeps; it has no peers."""
    alone = SimpleNamespace(size=lambda: 1)
    place = SimpleNamespace(holds_batch=holds_batch, groups=SimpleNamespace(mp=alone, cp=alone))
    return BatchFrames(place, pad_multiple=1)


def test_a_rank_holds_one_batch_for_its_step():
    _, frames = two()
    ours = rank()
    assert ours.hold(frames) == 4
    with pytest.raises(AssertionError, match="still holds the batch of step 4"):
        ours.hold(frames)
    assert ours.take(4).step == 4
    with pytest.raises(AssertionError, match=r"^step 4: .* no batch"):
        ours.take(4)
    ours.hold(frames)
    with pytest.raises(AssertionError, match=r"^step 5: .* step 4$"):
        ours.take(5)
    with pytest.raises(AssertionError, match="from a peer"):
        rank(holds_batch=False).hold(frames)

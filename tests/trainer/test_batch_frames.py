"""A batch on the wire: the same columns as ever, and nothing else is accepted."""

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
from random_policy import random_samples
from rollout_groups import rollout

from megatron_scalerl.batching.packing import build, pack
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.batch_frames import BatchFrames, checked
from megatron_scalerl.trainer.messages import InvalidMessage
from megatron_scalerl.types import ExpertChoices, Sample


def drawn(seed, *, experts):
    """Samples with masks, mixed versions, large ids, log-probs of either width, experts for some of them."""
    rng, samples = random.Random(seed), []
    for sample in random_samples(seed, count=rng.randint(1, 14)):
        made = sample.rollout
        made = replace(made, token_ids=tuple(token << rng.randrange(25) for token in made.token_ids))
        if rng.random() < 0.5:
            made = replace(made, rollout_logprobs=tuple(np.float32(made.rollout_logprobs).tolist()))
        if experts and rng.random() < 0.7:
            width = rng.choice([1, 2])
            positions = len(sample.prompt_token_ids) + len(made.token_ids) - 1
            choices = rng.randbytes(positions * 3 * 2 * width)
            made = replace(made, expert_choices=ExpertChoices(layers=3, topk=2, width=width, data=choices))
        samples.append(replace(sample, rollout=made))
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


def bad_batches():
    samples, frames = two()
    [members] = planned(samples).ranks[0].micro_batches
    first, second = members
    raw = msgspec.msgpack.decode(frames[0])
    where = r"^batch of step 4: "
    return {
        "no frame": ([], "without a frame"),
        "a completion missing": (frames[:-1], where + "1 completions and 2 sizes .* 2 samples$"),
        "a completion too many": ([*frames, frames[1]], where + "3 completions and 2 sizes .* 2 samples$"),
        "a completion cut": ([frames[0], frames[1][:-1], frames[2]], where + "completion 0 has 75 bytes .* 76$"),
        "a damaged completion": (
            [frames[0], b"\x09" + frames[1][1:], frames[2]],
            where + "completion 0: rollout: format 9 .* 1 is read here$",
        ),
        "a length without tokens": (
            with_plan(frames, micro_batches=((replace(first, tokens=2**60), second),)),
            where + "completion 0: 3 tokens .* 1152921504606846976$",
        ),
        "a negative length": (
            with_plan(frames, micro_batches=((replace(first, tokens=-3), second),)),
            where + "completion 0: 3 tokens .* -3$",
        ),
        "one sample fewer": (
            with_plan(frames, micro_batches=((first,),)),
            where + "2 completions and 2 sizes .* 1 samples$",
        ),
        "text for a number": (
            [msgspec.msgpack.encode(raw | {"plan": raw["plan"] | {"step": "4"}}), *frames[1:]],
            "bytes received are no valid message",
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


def rank(*, holds_batch=True):
    """What one rank keeps; it has no peers."""
    alone = SimpleNamespace(size=lambda: 1)
    place = SimpleNamespace(holds_batch=holds_batch, groups=SimpleNamespace(mp=alone, cp=alone))
    return BatchFrames(place, pad_multiple=1)


def test_a_rank_holds_one_batch_for_its_step():
    _, frames = two()
    ours = rank()
    assert ours.hold(frames) == 4
    with pytest.raises(AssertionError, match="before step 4 took its batch"):
        ours.hold(frames)
    assert ours.take(4).step == 4
    with pytest.raises(AssertionError, match=r"^step 4: .* no batch"):
        ours.take(4)
    ours.hold(frames)
    with pytest.raises(AssertionError, match=r"^step 5: .* step 4$"):
        ours.take(5)
    with pytest.raises(AssertionError, match="from a peer"):
        rank(holds_batch=False).hold(frames)

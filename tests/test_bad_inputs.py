"""Bad inputs: each has one line of error; random changes of valid ones crash nothing."""

import json
import math

import bad_inputs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.batching.assignment import SampleFacts, plan_step
from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.engine.answers import completion
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.batch_frames import HeldBatch, Limits, checked
from megatron_scalerl.types import CompletionLost
from megatron_scalerl.weights import plan as weight_plans

FILES = {"prompts", "checkpoint", "journal", "rollout store", "ledger", "evaluation's result", "points to fit"}
"""Sources whose errors name the file."""


@pytest.mark.slow
def test_every_bad_input_is_refused_in_one_line(tmp_path):
    found = bad_inputs.cases(tmp_path)
    assert len(found) >= 60 and len({(source, what) for source, what, _ in found}) == len(found)
    for case in found:
        error = bad_inputs.error_of(case)
        assert isinstance(error, ValueError | RuntimeError | OSError), (case[:2], type(error))
        assert str(error).strip() and "\n" not in str(error) and len(str(error)) < 2000, case[:2]
        assert case[0] not in FILES or str(tmp_path) in str(error), case[:2]


@st.composite
def changed(draw, whole):
    """Valid bytes after up to three changes: a byte, a cut, a repetition, an insertion."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["byte", "cut", "repeat", "insert"])):
            case "byte" if data:
                data[place] = draw(st.integers(0, 255))
            case "cut":
                del data[place:]
            case "repeat":
                data += data[place : place + 40]
            case "insert":
                data[place:place] = draw(st.binary(max_size=8))
    return bytes(data)


DATA = rollout_bytes.write(rollout(mask=(True, False, True), versions=(1, 1, 2)))
FACT = SampleFacts(prompt_token_ids=(1, 2), tokens=3, advantage=1.0, token_weight=1.0)
PLAN = plan_step([FACT], step=4, dp_size=1, micro_batch_tokens=64, policy_version=3).ranks[0]
HEAD = bytes(messages.batch_frames(PLAN, [DATA])[0])
ANSWER = json.dumps(bad_inputs.valid_answer()).encode()
DONE = messages.encode(messages.Done(call=1, rank=0, value=messages.msgspec.Raw(b"\xc0")))
WEIGHT_PLAN = weight_plans.to_json(weight_plans.whole(weight_plans.manifest_of([("w", "float32", (2, 3))]))).encode()
JOURNAL = b'{"event":"admit","group_id":0,"prompt_id":"p","epoch":0}\n{"event":"batch","batch":0,"step":1,' + (
    b'"policy_version":0,"group_ids":[0]}\n'
)


@given(changed(ANSWER))
@settings(max_examples=400, deadline=None)
def test_a_changed_response_is_a_whole_completion_or_an_error(data):
    try:
        found = completion(data, plan=None, seed=0, where="engine-0: /generate")
    except (RuntimeError, CompletionLost) as error:
        assert str(error).startswith("engine-0: /generate: ")
    else:
        assert isinstance(found, RolloutArrays)
        lengths = {
            len(found.token_ids),
            len(found.rollout_logprobs),
            len(found.policy_versions),
            len(found.loss_mask),
        }
        assert len(lengths) == 1 and (found.rollout_logprobs <= 1e-3).all()


@given(changed(HEAD), changed(DATA), st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_changed_batch_is_a_whole_batch_or_refused(head, data, first):
    frames = [head, DATA] if first else [HEAD, data]
    try:
        held = checked(frames, Limits(micro_batch_tokens=64, experts=None))
    except (messages.InvalidMessage, AssertionError) as error:
        assert isinstance(error, messages.InvalidMessage) or first, "another command is the receiver's to refuse"
    else:
        assert isinstance(held, HeldBatch)
        assert [len(c.token_ids) for c in held.completions] == [s.tokens for s in held.plan.samples]


@given(changed(DONE))
@settings(max_examples=300, deadline=None)
def test_a_changed_message_is_a_message_or_refused(data):
    try:
        messages.decode_for_controller([data])
    except messages.InvalidMessage as error:
        assert "\n" not in str(error)


@given(changed(WEIGHT_PLAN))
@settings(max_examples=300, deadline=None)
def test_a_changed_weight_plan_is_a_plan_or_refused(data):
    try:
        found = weight_plans.from_json(data.decode("utf8", "replace"))
    except ValueError as error:
        assert str(error).startswith("weights: ")
    else:
        sent = sum(slot.nbytes for bucket in weight_plans.buckets(found, 1) for slot in bucket.slots)
        needed = [
            math.prod(b - a for a, b in ranges) * meta.item_bytes
            for needs in found.needs
            for meta, rectangles in zip(found.parameters, needs, strict=True)
            for ranges in rectangles
        ]
        assert sent == sum(needed)


@given(changed(JOURNAL))
@settings(max_examples=150, deadline=None)
def test_a_changed_journal_is_read_to_its_last_whole_line_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / "journal.jsonl").write_bytes(data)
    try:
        read_history(folder)
    except ValueError as error:
        assert "journal.jsonl" in str(error) and "\n" not in str(error)

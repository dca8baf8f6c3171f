"""Bad inputs have one line of error; random changes of valid ones crash nothing."""

import json
import math

import msgspec
import pytest
from fakes.server import answer
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_groups import rollout
from worker_needs import whole_plan

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.batching.assignment import SampleFacts, plan_step
from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.engine.answers import completion
from megatron_scalerl.evaluation.problems import read_problems
from megatron_scalerl.evaluation.results import Header, ResultFile
from megatron_scalerl.fit.table_file import read_tables
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.batch_frames import ReceivedBatch, checked
from megatron_scalerl.types import CompletionLost
from megatron_scalerl.weights import plan as weight_plans

DEEP = "[" * 100_000
PROBLEM = '{"ID": "a", "Problem": "2+2", "Answer": 4}\n'
HEADER = Header(policy="p", digest="d", version=0, files=(), seed=1, settings={})
RESULT = json.dumps({"header": msgspec.to_builtins(HEADER)})


def problems(path):
    return read_problems(str(path), "aime")


@pytest.mark.parametrize(
    "name, content, read, said",
    [
        ("p.jsonl", "", problems, "the file has no problem"),
        ("p.jsonl", PROBLEM * 2, problems, "line 2: an earlier row has the id 'a', too"),
        ("p.jsonl", DEEP, problems, "line 1: the line is not JSON"),
        (
            "completions.jsonl",
            f"{RESULT}\n{DEEP}\n",
            lambda path: ResultFile(path.parent, HEADER),
            "line 2: the line is not a JSON object",
        ),
        ("t.jsonl", DEEP + "\n{}\n", read_tables, "maximum recursion depth"),
        ("t.json", DEEP, read_tables, "maximum recursion depth"),
        (
            "l.jsonl",
            '{"unit": "h"}\n{"batch": 1, "step": 1, "role": "trainer"}\n',
            lambda path: Ledger(path, "h", incarnation="0"),
            "line 2: the row is neither a charge",
        ),
        (
            "r.yaml",
            "name: r",
            lambda path: load_recipe(path, ["steps"]),
            "override 'steps': write it as key.path=value",
        ),
    ],
)
def test_a_bad_file_is_one_line(name, content, read, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path / name)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value) or "override" in said


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
ANSWER = json.dumps(answer()).encode()
DONE = messages.encode(messages.Done(call=1, rank=0, value=messages.msgspec.Raw(b"\xc0")))
WEIGHT_PLAN = weight_plans.to_json(whole_plan(weight_plans.manifest_of([("w", "float32", (2, 3))]))).encode()
JOURNAL = b'{"event":"admit","group_id":0,"prompt_id":"p","epoch":0}\n{"event":"batch","batch":0,"step":1,' + (
    b'"policy_version":0,"group_ids":[0]}\n'
)


@given(changed(ANSWER))
@settings(max_examples=400, deadline=None)
def test_a_changed_response_is_a_whole_completion_or_an_error(data):
    try:
        found = completion(data, plan=None, seed=0, source="engine-0: /generate")
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
        held = checked(frames)
    except (messages.InvalidMessage, AssertionError) as error:
        assert isinstance(error, messages.InvalidMessage) or first, "another command is the receiver's to refuse"
    else:
        assert isinstance(held, ReceivedBatch)
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

"""Named columns of tokens, from the algorithm's score to the loss, and advantages of single tokens."""

import asyncio
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from recipe_files import small_recipe
from rollout_groups import group, group_of, parts_of, rollout
from stored_episodes import FORKED

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.assignment import SampleFacts, plan_step
from megatron_scalerl.batching.packing import build
from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, joined_parts, read, write
from megatron_scalerl.controller.samples import samples_of
from megatron_scalerl.engine.client import EngineClient
from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.rollouts.columns import Teachers, with_columns
from megatron_scalerl.types import Score

PLAIN = rollout(tokens=(5, 6, 7), mask=(True, False, True))
NAMED = {"teacher": np.array([-1.5, np.nan, -0.25], np.float32), "turn": np.array([1, 2, 3], np.float32)}


def test_columns_are_exact_in_the_bytes_and_cost_nothing_without():
    found = read(write(replace(arrays_of(PLAIN), columns=NAMED)))
    assert list(found.columns) == ["teacher", "turn"]
    for name, column in NAMED.items():
        assert found.columns[name].tobytes() == column.tobytes()
    assert write(replace(found, columns={})) == write(PLAIN) and read(write(PLAIN)).columns == {}
    twice = joined_parts([found, found])
    assert twice.columns["turn"].tolist() == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("cut", [*range(1, 39), -1, -5])
def test_bytes_that_are_no_columns_are_refused(cut):
    """Too few or too many bytes, names that run over the end, and no name at all."""
    data = write(replace(arrays_of(PLAIN), columns=NAMED))
    start = len(write(PLAIN))
    changed = data[: len(data) - cut] if cut > 0 else data + bytes(-cut)
    if len(changed) < start:
        changed = data[:start]
    with pytest.raises(ValueError, match="do not fit columns of 3 tokens"):
        read(changed)
    for count in (0, 1, 3, 255):
        with pytest.raises(ValueError, match="do not fit columns"):
            read(data[:start] + bytes([count]) + data[start + 1 :])


def test_columns_and_advantages_of_tokens_stand_where_their_token_is_predicted():
    facts = SampleFacts(prompt_token_ids=(1, 2), tokens=3, advantage=(0.5, -9.0, 1.5), token_weight=0.25)
    step = plan_step([facts, facts], step=1, dp_size=2, micro_batch_tokens=16, policy_version=0)
    arrays = replace(arrays_of(PLAIN), columns=NAMED)
    [row] = build(step.ranks[0], [arrays], pad_multiple=8, columns=("turn", "teacher")).micro_batches
    assert row.columns.dtype == np.float32 and len(row.tokens) == 8
    assert row.columns[:, 0].tolist() == [0, 1, 0, 3, 0, 0, 0, 0], "masked tokens and padding have 0"
    assert row.columns[:, 1].tolist() == [0, -1.5, 0, -0.25, 0, 0, 0, 0]
    assert row.advantages.tolist() == [0, 0.5, -9.0, 1.5, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="a completion lacks column 'teacher"):
        build(step.ranks[0], [arrays_of(PLAIN)], pad_multiple=1, columns=("teacher",))


@dataclass(frozen=True, kw_only=True)
class ByToken(ScaleRL):
    """The advantage of a token is its number in the completion; its score gives that number, too."""

    columns = ("number",)

    def advantages(self, groups):
        return [[[float(n) for n in range(c.tokens)] for c in members.completions] for members in groups]

    async def score(self, group, samples):
        calls.append(group.group_id)
        if len(calls) < 3:
            raise OSError("the teacher is down")
        return [{"number": range(len(sample.token_ids))} for sample in samples]


calls = []


def test_the_parts_of_an_episode_share_the_advantages_of_its_tokens():
    made = (FORKED, PLAIN)
    scores = [Score(correct=right, reward=float(right)) for right in (True, False)]
    members = group_of(made, scores, prompt=group([1]).prompt)
    plan = samples_of([members], ByToken())
    sizes = [len(part.token_ids) for part in FORKED]
    numbers = [list(sample.advantage) for sample in plan.samples]
    assert [len(part) for part in numbers] == [*sizes, 3]
    assert list(chain(*numbers[:-1])) == list(range(sum(sizes))) and numbers[-1] == [0, 1, 2]
    assert plan.trained.advantages == {0: {0: (sum(sizes) - 1) / 2, len(FORKED): 1.0}}


async def test_a_score_that_fails_is_asked_again_and_every_part_gets_its_columns(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.columns.PAUSES_S", (0.0,) * 4)
    calls.clear()
    samples = [write(part) for made in (FORKED, PLAIN) for part in parts_of(made)]
    scored = await with_columns(ByToken(), group([1, -1], group_id=7), samples)
    assert calls == [7] * 3 and len(scored) == len(samples)
    for before, after in zip(map(read, samples), map(read, scored)):
        assert after.columns["number"].tolist() == list(range(len(before.token_ids)))
        assert write(replace(after, columns={})) == write(before)


async def test_a_request_to_a_teacher_waits_for_it_and_is_repeated_by_the_next_one():
    """The first server never answers and is evicted; the second one starts later."""
    asked = asyncio.Event()

    async def silent(request):
        asked.set()
        await asyncio.Event().wait()

    async def answering(request):
        token_ids = (await request.json())["token_ids"]
        rows = [None, *({str(token): {"logprob": -place}} for place, token in enumerate(token_ids[1:], 1))]
        return web.json_response({"prompt_logprobs": rows, "choices": []})

    members = Membership(0, teachers={"teacher-t": 1})
    algorithm = {"name": "distilled", "teachers": {"t": {"path": "p"}}}
    teachers = Teachers(small_recipe(algorithm=algorithm), members)
    scoring = asyncio.create_task(
        teachers.score(replace(group([1]), completions=(facts_of(arrays_of(PLAIN)),)), [arrays_of(PLAIN)])
    )
    async with RawTestServer(silent) as first, RawTestServer(answering) as second:
        clients = [EngineClient(url=str(server.make_url("")), secret="s") for server in (first, second)]
        members.join(0, clients[0])
        await asyncio.wait_for(asked.wait(), 60)
        members.evict(clients[0], "it hangs")
        members.join(0, clients[1])
        [columns] = await asyncio.wait_for(scoring, 60)
        for client in clients:
            await client.close()
    prompt = len(group([1]).prompt.token_ids)
    assert columns["teacher_logprobs"].tolist() == [-prompt, 0, -prompt - 2]
    assert clients[1].received_tokens == 1


THREE = {"number": [0.0, np.nan, 2.0]}


@pytest.mark.parametrize(
    "given, said",
    [
        ([THREE], r"ValueError\('zip"),
        ([THREE, {"other": [0.0] * 3}], r"score returned the columns \['other'\] instead of \['number'\]"),
        ([THREE, {"number": [0.0]}], r"column number has shape \(1,\)"),
        ([THREE, {"number": [np.nan, 0.0, 0.0]}], "has to have a finite number for each of the 3 tokens"),
        ([THREE, {"number": [1e39, 0.0, 0.0]}], "has to have a finite number"),
        (OSError("the teacher is down"), "failed in every try; the last error: OSError"),
        (None, "failed in every try; the last error: TimeoutError"),
    ],
)
async def test_a_score_without_its_columns_ends_the_run(monkeypatch, given, said):
    """A masked token may have any number; None: an answer that never comes."""

    async def score(self, group, samples):
        if given is None:
            await asyncio.Event().wait()
        if isinstance(given, OSError):
            raise given
        return given

    monkeypatch.setattr("megatron_scalerl.rollouts.columns.PAUSES_S", (0.0,) * 4)
    monkeypatch.setattr("megatron_scalerl.rollouts.columns.SCORE_S", 0.01 if given is None else 60.0)
    monkeypatch.setattr(ByToken, "score", score)
    with pytest.raises(RuntimeError, match=said):
        await with_columns(ByToken(), group([1, -1]), [write(PLAIN)] * 2)


@pytest.mark.parametrize("advantage", [[9.0] * 2, [9.0] * 5, [9.0], [1.0, np.nan, 0.0], np.inf, [[1.0] * 3]])
def test_an_advantage_that_fits_no_token_is_refused(monkeypatch, advantage):
    monkeypatch.setattr(ByToken, "advantages", lambda self, groups: [[advantage, 1.0]])
    with pytest.raises(RuntimeError, match=r"group 4 has an advantage of shape .* for a completion of 3 tokens"):
        samples_of([group([1, -1], group_id=4)], ByToken())


def test_advantages_may_be_arrays(monkeypatch):
    monkeypatch.setattr(ByToken, "advantages", lambda self, groups: [[np.array([1, 2, 3]), np.float32(-1)]])
    plan = samples_of([group([1, -1])], ByToken())
    assert [sample.advantage for sample in plan.samples] == [(1.0, 2.0, 3.0), -1.0]
    assert plan.trained.advantages == {0: {0: 2.0, 1: -1.0}}

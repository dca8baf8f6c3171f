"""The result on disk: resumed, never half-written, of one evaluation; every row of one policy version."""

import asyncio
from dataclasses import replace

import pytest
from fakes.engine import StandInEngine
from fakes.sampler import StandInDraw, StandInSampler

from megatron_scalerl.engine.membership import Membership
from megatron_scalerl.evaluation.completing import Completer, Request, row_of
from megatron_scalerl.evaluation.results import (
    Header,
    Key,
    OtherResult,
    ResultFile,
    Row,
    cells,
)
from megatron_scalerl.types import CompletionLost, Prompt

HEADER = Header(policy="p", digest="d", version=0, files=(("a", "1"),), seed=1, settings={"k": 2, "dtype": "float32"})


def key(number, index=0):
    return Key(file="a", number=number, index=index)


def row(number, index=0, *, correct=True, lost=""):
    return Row(key=key(number, index), problem_id=str(number), correct=correct, tokens=4, lost=lost, text="x")


def written(folder, *rows, torn=b""):
    """The file of a result with these rows and bytes at its end."""
    with ResultFile(folder, HEADER) as result:
        for each in rows:
            result.append(each)
    with result.path.open("ab") as file:
        file.write(torn)
    return result.path


def test_rows_are_kept_and_a_torn_one_is_dropped(tmp_path):
    path = written(tmp_path, row(1), row(2, correct=False), torn=b'{"key": {"file": "a", "num')
    with ResultFile(tmp_path, HEADER) as again:
        assert set(again.rows) == {key(1), key(2)} and again.rows[key(1)] == row(1)
        again.append(row(3))
    with ResultFile(tmp_path, HEADER) as last:
        assert [r.key.number for r in last.rows.values()] == [1, 2, 3]
    assert path.stat().st_mode & 0o777 == 0o600, "prompts' answers and completions are their owner's"


@pytest.mark.parametrize(
    "changed, named",
    [
        (replace(HEADER, digest="e"), "digest: 'd', not 'e'"),
        (replace(HEADER, settings={"k": 4, "dtype": "float32"}), "settings.k: 2, not 4"),
        (replace(HEADER, files=(("a", "2"),)), "files: "),
    ],
)
def test_another_evaluation_is_refused_and_changes_nothing(tmp_path, changed, named):
    path = written(tmp_path, row(1))
    before = path.read_bytes()
    with pytest.raises(OtherResult, match=r"completions\.jsonl: the file is of another evaluation: ") as error:
        ResultFile(tmp_path, changed)
    assert named in str(error.value) and path.read_bytes() == before
    with ResultFile(tmp_path, replace(HEADER, policy="moved/p")) as moved:
        assert len(moved.rows) == 1, "the digest says what the policy is"


def test_a_damaged_row_names_its_line(tmp_path):
    written(tmp_path, row(1), torn=b'{"key": 5}\n')
    with pytest.raises(OtherResult, match=r"completions.jsonl line 3: the line is not a completion: "):
        ResultFile(tmp_path, HEADER)


def test_a_cell_needs_every_completion():
    keys = [key(1), key(1, 1), key(2), key(2, 1)]
    rows = [row(1), row(1, 1, correct=False), row(2, lost="no_logprobs"), row(2, 1)]
    [cell] = cells(rows, keys)
    assert (cell.outcomes, cell.lost) == ([[True, False], [True]], 1)
    with pytest.raises(ValueError, match="completion 1 of problem 2 is missing"):
        cells(rows[:3], keys)
    with pytest.raises(ValueError, match="problem 2: all of its completions are lost"):
        cells([*rows[:3], row(2, 1, lost="x")], keys)


def test_a_problem_of_which_all_completions_are_lost_is_generated_again(tmp_path):
    keys = [key(1), key(1, 1), key(2), key(2, 1), key(3)]
    with ResultFile(tmp_path, HEADER) as result:
        for each in (row(1, lost="x"), row(1, 1, lost="x"), row(2, lost="x"), row(2, 1)):
            result.append(each)
        assert result.missing(keys) == [key(1), key(1, 1), key(3)]
        result.append(row(1))
    with ResultFile(tmp_path, HEADER) as again:
        assert again.missing(keys) == [key(3)], "the later row of a completion counts"


class Tokenizer:
    def decode(self, token_ids, **settings):
        return " ".join(map(str, token_ids))


def sampler_of(*lost):
    """Completions of the engine's version; these prompts' are lost, twice each."""
    left, running = dict.fromkeys(lost, 2), []

    async def wait(engine, draw, priority):
        running.append(draw)
        made.most = max(made.most, len(running))
        await asyncio.sleep(0)
        running.remove(draw)
        if left.get(draw.seed):
            left[draw.seed] -= 1
            raise CompletionLost("no log-probabilities", reason="no_logprobs")

    made = StandInSampler(wait, correct=lambda draw: True, tokens=lambda draw: (5, 6))
    made.most = 0
    return made


def completed(sampler, engines, *, version=3, count=6):
    async def run():
        members = Membership.of(engines, version=version)
        requests = [
            Request(
                key=key(number),
                prompt=Prompt(prompt_id=str(number), text="t", answer="1", token_ids=(1,)),
                draw=StandInDraw(number, 7, 0),
                sampler=sampler,
            )
            for number in range(1, count + 1)
        ]
        rows = []
        await Completer(members=members, version=version, at_once=2).complete_all(
            requests, lambda request, completion: rows.append(row_of(request, completion, Tokenizer()))
        )
        return rows, members

    return asyncio.run(run())


def test_every_completion_is_recorded_with_its_version():
    sampler = sampler_of()
    rows, _ = completed(sampler, [StandInEngine(version=3)])
    assert sorted(r.key.number for r in rows) == [1, 2, 3, 4, 5, 6] and sampler.most == 2
    assert {r.versions for r in rows} == {(3, 3)} and rows[0].text == "5 6" and rows[0].cut == 7


def test_the_tokens_of_a_row_are_those_of_the_policy():
    mask = (True, False, False, True)
    sampler = StandInSampler(tokens=lambda draw: (5, 6, 7, 8), mask=mask, environment=((1, 2),))
    [row], _ = completed(sampler, [StandInEngine(version=3)], count=1)
    assert (row.tokens, row.sampled_tokens, row.text) == (3, 2, "5 6 7 8")


def test_an_engine_with_another_version_is_evicted_and_its_completion_is_generated_elsewhere():
    wrong = StandInEngine(version=4)
    rows, members = completed(sampler_of(), [wrong, StandInEngine("engine-1", 3)])
    assert len(rows) == 6 and {r.versions for r in rows} == {(3, 3)}
    assert wrong.aborted == "engine-0: it answered with policy version 4, not 3"
    assert [engine.name for engine in members.serving] == ["engine-1"]


def test_a_completion_that_is_lost_twice_is_recorded_as_lost():
    rows, _ = completed(sampler_of(2), [StandInEngine(version=3)])
    assert [(r.key.number, r.lost) for r in rows if r.lost] == [(2, "no_logprobs")] and len(rows) == 6

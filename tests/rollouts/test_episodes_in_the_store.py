"""Episodes in store and journal: one table entry for each part, old segments, and a batch with a fork in it."""

from dataclasses import replace

import pytest
from journals import write_journal
from rollout_groups import group_of, parts_of, rollout
from stored_episodes import BEFORE, EPISODE, FORKED, SEGMENT_BEFORE

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.controller.samples import samples_of, trained_part
from megatron_scalerl.rollouts.completions import completions_of
from megatron_scalerl.rollouts.group_files import listed_groups
from megatron_scalerl.rollouts.history import BatchRecord, read_batch, read_history
from megatron_scalerl.rollouts.store import (
    GroupHeader,
    block_bytes,
    positions_of,
    read_arrays,
    read_completions,
    read_head,
    segment_path,
    stored_header,
)
from megatron_scalerl.types import BlockRef, Prompt, Score

PLAIN = rollout(tokens=(9, 2))
PROMPT = Prompt(prompt_id="p", text="7;+2=", answer="9", token_ids=(1, 13))
SCORES = (
    Score(correct=False, reward=-1.0),
    Score(correct=True, reward=1.0),
    Score(correct=False, reward=0.0),
    Score(correct=True, reward=1.0),
)
MADE = (PLAIN, FORKED, EPISODE, replace(PLAIN, truncated=True))
ALGORITHM = ScaleRL(normalize="none")


@pytest.fixture
def run(tmp_path):
    """A run with a group of four completions, of which the second forked into three parts, in one batch."""
    group = group_of(MADE, SCORES, prompt=PROMPT)
    assert group.positions == (0, 1, 4, 5)
    write_journal(
        tmp_path, groups=[(group, MADE)], batches=[BatchRecord(batch=0, step=1, policy_version=0, group_ids=(0,))]
    )
    return tmp_path, group


def test_a_segment_from_before_is_read(tmp_path):
    path = segment_path(tmp_path, 0)
    path.write_bytes(SEGMENT_BEFORE)
    stored = BlockRef(segment=0, offset=16, nbytes=len(SEGMENT_BEFORE) - 16)
    group, samples = read_arrays(path, stored)
    assert rollout_bytes.rollout_of(samples[0]) == BEFORE
    assert [c.tokens for c in group.header.completions] == [4, 2] == [len(s.token_ids) for s in samples]
    assert group.header.completions[0] == rollout_bytes.facts_of(samples[0])
    assert positions_of(group.header.completions) == (0, 1)


def test_a_group_of_the_journal_has_its_episodes(run):
    folder, group = run
    history = read_history(folder)
    [found] = read_batch(folder, history, history.batches[0])
    assert found == replace(group, stored=found.stored) and len(found.completions[1].parts) == 3
    path = segment_path(folder / "rollouts", 0)
    data = read_completions(path, found.stored, range(6))
    assert [rollout_bytes.rollout_of(rollout_bytes.read(part)) for part in data] == [
        part for made in MADE for part in parts_of(made)
    ]
    assert history.finished[0].pass_rate == 0.5, "episodes count, not parts"


async def test_the_samples_of_a_batch_are_parts_with_the_bytes_of_the_store(run):
    folder, _ = run
    history = read_history(folder)
    plan = samples_of(read_batch(folder, history, history.batches[0]), ALGORITHM)
    assert [number for _, number in plan.sources] == [0, 1, 2, 3, 4], "the truncated one is not trained"
    assert [sample.tokens for sample in plan.samples] == [2, 3, 5, 8, 11]
    assert [sample.advantage for sample in plan.samples] == [-1.0, 1.0, 1.0, 1.0, 0.0]
    assert (plan.stats["samples"], plan.stats["completions"], plan.stats["truncated_dropped"]) == (5, 4, 1)
    assert plan.stats["loss_tokens"] == 2 + 6 + 6
    data = await completions_of(folder, plan.sources)([4, 3, 0])
    assert [rollout_bytes.rollout_of(rollout_bytes.read(part)) for part in data] == [EPISODE, FORKED[2], PLAIN]


def test_a_filter_leaves_the_positions_of_an_episode():
    cut = (*FORKED[:2], replace(FORKED[2], truncated=True))
    group = group_of((PLAIN, cut, EPISODE), SCORES[:3], prompt=PROMPT)
    assert trained_part(group, ALGORITHM).positions == (0, 4)
    plan = samples_of([group], ALGORITHM)
    assert [number for _, number in plan.sources] == [0, 4]


def test_a_block_with_a_part_too_few_is_refused():
    group = group_of(MADE, SCORES, prompt=PROMPT)
    header = GroupHeader(
        prompt=PROMPT,
        epoch=0,
        first_token_version=0,
        lost_completions=0,
        scores=SCORES,
        completions=group.completions,
    )
    data = [rollout_bytes.write(part) for made in MADE for part in parts_of(made)]
    assert stored_header(read_head(block_bytes(0, header, data))) == header
    for damaged, said in (
        (
            block_bytes(0, header, data[:5]),
            "5 samples, but the header has 4 scores, and 4 completions with 6 samples$",
        ),
        (
            block_bytes(0, replace(header, scores=SCORES[:3]), data),
            "6 samples, but the header has 3 scores, and 4 completions with 6 samples$",
        ),
    ):
        with pytest.raises(ValueError, match=f"the group has {said}"):
            stored_header(read_head(damaged))


def test_a_listed_group_has_an_episodes_parts_one_after_another(run):
    [listed] = listed_groups(run[0])
    _, forked, episode, _ = listed.read()["rollouts"]
    assert forked["token_ids"] == sum((part.token_ids for part in FORKED), ())
    assert forked["parts"] == {1: 0, 2: 3, 3: 8} and episode["parts"] == {4: 0}
    assert (forked["turns"], forked["environment_tokens"]) == (3, 8)
    assert (episode["turns"], episode["environment_tokens"]) == (3, 3)

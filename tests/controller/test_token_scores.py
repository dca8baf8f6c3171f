"""Scores of tokens: of which completions, with which weights, and where."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes.trainer import StandInTrainer
from journals import write_journal
from recipe_files import small_recipe
from rollout_groups import group_of, rollout
from stored_episodes import FORKED

from megatron_scalerl.batching.rollout_bytes import arrays_of, write
from megatron_scalerl.controller.token_scores import TokenScores
from megatron_scalerl.rollouts.history import read_groups, read_history
from megatron_scalerl.rollouts.store import GroupHeader, StoreWriter, block_bytes
from megatron_scalerl.rollouts.token_scores import read_scores
from megatron_scalerl.types import Prompt, Score


def made_store(run_dir):
    (run_dir / "rollouts").mkdir()
    return StoreWriter(run_dir / "rollouts")


def stored_group(writer, number, rewards):
    """Completion i of group n has the tokens 100 n + 10 i, + 1, ...: i + 1 of them."""
    prompt = Prompt(prompt_id=f"p{number}", text="", answer="", token_ids=(7, 8))
    rollouts = [
        rollout(tokens=tuple(range(100 * number + 10 * i, 100 * number + 11 * i + 1))) for i in range(len(rewards))
    ]
    scores = tuple(Score(correct=r > 0, reward=float(r)) for r in rewards)
    group = group_of(rollouts, scores, prompt=prompt, group_id=number)
    header = GroupHeader(
        prompt=prompt,
        scores=scores,
        epoch=0,
        first_token_version=0,
        lost_completions=0,
        completions=group.completions,
    )
    stored = writer.append(block_bytes(number, header, [write(arrays_of(each)) for each in rollouts]))
    return replace(group, stored=stored)


@pytest.fixture
def scorer(tmp_path):
    recipe = small_recipe(steps=4, telemetry={"token_scores_every": 2})
    trainer = StandInTrainer()
    return TokenScores(recipe, SimpleNamespace(trainer=trainer), tmp_path), trainer


def test_best_and_worst_of_groups_that_tell_something_are_scored(scorer, tmp_path):
    scores, trainer = scorer
    writer = made_store(tmp_path)
    groups = [
        stored_group(writer, 2, [-1, 1, -1]),
        stored_group(writer, 1, [1, 1]),
        stored_group(writer, 0, [1, 0, -1]),
    ]
    filtered = replace(
        groups[0], completions=groups[0].completions[1:], positions=(1, 2), scores=groups[0].scores[1:]
    )
    asyncio.run(scores.record(1, groups))
    assert trainer.asked == [] and read_scores(tmp_path, 1) == {}  # not due
    asyncio.run(scores.record(2, [filtered, *groups[1:]]))
    assert trainer.asked == [[[7, 8, 0], [7, 8, 20, 21, 22], [7, 8, 210, 211], [7, 8, 220, 221, 222]]]
    found = read_scores(tmp_path, 2)
    assert list(found) == [(0, 0), (0, 2), (2, 1), (2, 2)]
    assert found[2, 1].logprobs == [-210, -211] and found[2, 1].entropies == [2.1, 2.11]
    assert {row.policy_version for row in found.values()} == {1}
    asyncio.run(scores.record(2, groups[1:]))  # trained again
    assert list(read_scores(tmp_path, 2)) == [(0, 0), (0, 2)]


def test_every_part_of_a_forked_episode_is_scored(scorer, tmp_path):
    scores, trainer = scorer
    journal_group = group_of(
        (rollout(tokens=(9,)), FORKED, rollout(tokens=(7, 2))),
        [Score(correct=r > 0, reward=r) for r in (0.0, 1.0, -1.0)],
        prompt=Prompt(prompt_id="p", text="", answer="", token_ids=(7, 8)),
    )
    write_journal(tmp_path, groups=[(journal_group, (rollout(tokens=(9,)), FORKED, rollout(tokens=(7, 2))))])
    [group] = read_groups(tmp_path, read_history(tmp_path), [0]).values()
    asyncio.run(scores.record(2, [group]))
    assert trainer.asked == [[[7, 8, *part.token_ids] for part in (*FORKED, rollout(tokens=(7, 2)))]]
    found = read_scores(tmp_path, 2)
    assert [(key, len(row.logprobs)) for key, row in found.items()] == [
        ((0, 1), 3),
        ((0, 2), 5),
        ((0, 3), 8),
        ((0, 4), 2),
    ]


def test_nothing_is_asked_for_where_all_rewards_are_equal(scorer, tmp_path):
    scores, trainer = scorer
    asyncio.run(scores.record(2, [stored_group(made_store(tmp_path), 1, [1, 1])]))
    assert trainer.asked == [] and not (tmp_path / "token_scores").exists()


@pytest.mark.parametrize(
    "text", ['{"group_id": 1}\n', '{"group_id": 1, "position": 0, "policy_version": 1, "logprobs": 3}\n']
)
def test_a_damaged_file_is_one_line(tmp_path, text):
    (tmp_path / "token_scores").mkdir()
    (tmp_path / "token_scores" / "step_00000002.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"step_00000002\.jsonl: .* no scores of tokens: "):
        read_scores(tmp_path, 2)

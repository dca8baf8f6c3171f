"""Scores of tokens: of which completions, with which weights, and where."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes.trainer import StandInTrainer
from recipe_files import small_recipe
from rollout_groups import group_of, rollout

from megatron_scalerl.batching.rollout_bytes import arrays_of, write
from megatron_scalerl.controller.token_scores import TokenScores
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

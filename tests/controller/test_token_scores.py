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

from megatron_scalerl.controller.token_scores import TokenScores
from megatron_scalerl.rollouts.history import read_groups, read_history
from megatron_scalerl.rollouts.token_scores import read_scores
from megatron_scalerl.types import Prompt, Score


def completions(number, count):
    """Completion i of group n has the tokens 100 n + 10 i, + 1, ...: i + 1 of them."""
    return [rollout(tokens=range(100 * number + 10 * i, 100 * number + 11 * i + 1)) for i in range(count)]


def stored(run_dir, **rollouts):
    """Groups as a batch reads them. rollouts: gN -> (rewards, completions) of group N."""
    groups = []
    for name, (rewards, made) in rollouts.items():
        number = int(name[1:])
        prompt = Prompt(prompt_id=f"p{number}", text="", answer="", token_ids=(7, 8))
        scores = [Score(correct=r > 0, reward=float(r)) for r in rewards]
        groups.append((group_of(made, scores, prompt=prompt, group_id=number), made))
    write_journal(run_dir, groups=groups)
    read = read_groups(run_dir, read_history(run_dir), [group.group_id for group, _ in groups])
    return [read[group.group_id] for group, _ in groups]


@pytest.fixture
def scorer(tmp_path):
    recipe = small_recipe(steps=4, telemetry={"token_scores_every": 2})
    trainer = StandInTrainer()
    return TokenScores(recipe, SimpleNamespace(trainer=trainer), tmp_path), trainer


def test_best_and_worst_of_groups_that_tell_something_are_scored(scorer, tmp_path):
    scores, trainer = scorer
    rewards = {2: [-1, 1, -1], 1: [1, 1], 0: [1, 0, -1]}
    groups = stored(tmp_path, **{f"g{n}": (given, completions(n, len(given))) for n, given in rewards.items()})
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
    made = rollout(tokens=(9,)), FORKED, rollout(tokens=(7, 2))
    asyncio.run(scores.record(2, stored(tmp_path, g0=((0, 1, -1), made))))
    assert trainer.asked == [[[7, 8, *part.token_ids] for part in (*FORKED, made[2])]]
    found = read_scores(tmp_path, 2)
    assert {key: len(row.logprobs) for key, row in found.items()} == {(0, 1): 3, (0, 2): 5, (0, 3): 8, (0, 4): 2}


def test_nothing_is_asked_for_where_all_rewards_are_equal(scorer, tmp_path):
    scores, trainer = scorer
    asyncio.run(scores.record(2, stored(tmp_path, g1=([1, 1], completions(1, 2)))))
    assert trainer.asked == [] and not (tmp_path / "token_scores").exists()


@pytest.mark.parametrize(
    "text", ['{"group_id": 1}\n', '{"group_id": 1, "position": 0, "policy_version": 1, "logprobs": 3}\n']
)
def test_a_damaged_file_is_one_line(tmp_path, text):
    (tmp_path / "token_scores").mkdir()
    (tmp_path / "token_scores/step_00000002.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"step_00000002\.jsonl: .* no valid scores of tokens: "):
        read_scores(tmp_path, 2)

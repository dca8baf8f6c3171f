"""Episodes token by token: real decoders and environments, a verifier in processes, and an engine with a script."""

import asyncio

import pytest
from recipe_files import small_recipe
from scripted_episodes import RIGHT, THREE, arrays, completed, ids, prompt, said, wrong

from megatron_scalerl.batching.rollout_bytes import facts_of_parts, read, rollout_of
from megatron_scalerl.rollouts.plans import Draw
from megatron_scalerl.rollouts.trace import Trace
from megatron_scalerl.types import ENDS, CompletionLost, Part, Score


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend("tests/rollouts")
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))


@pytest.mark.slow
def test_an_episode_of_three_turns_equals_the_hand(tmp_path):
    """Two calls of a tool and a forced end of thinking: [tokens, their origin, version, log-prob] by hand."""
    result, engine, _ = completed(tmp_path, "Said", *THREE, row=prompt(messages=["2", "9"]))
    first = (1, 13, 20, 16, 8, 20, 17, 13, 19, 3)
    turns = ((4, 13, 16, 8, 17, 13, 19, 2), (13, 20, 5, 4, 13, 16, 8, 19, 2), (4, 8, 2))
    between = ((8, 3), (15, 3))
    assert result.prompt.token_ids == first
    rollout = rollout_of(read(result.parts[0]))
    assert rollout.token_ids == (*turns[0], *between[0], *turns[1], *between[1], *turns[2])
    assert rollout.loss_mask == (
        *(True,) * 8, *(False,) * 2, True, True, False, False, *(True,) * 5, *(False,) * 2, *(True,) * 3
    )  # fmt: skip
    assert rollout.environment == ((8, 10), (19, 21))
    assert rollout.policy_versions == (3,) * 14 + (4,) * 10
    steps = (-0.125, -0.25, -0.375, -0.5)
    assert rollout.rollout_logprobs == (
        *steps, *steps, 0.0, 0.0, *steps[:2], 0.0, 0.0, *steps, -0.125, 0.0, 0.0, *steps[:3]
    )  # fmt: skip
    assert (rollout.interrupted, rollout.truncated) == (True, False)
    assert [context for context, _ in engine.asked] == [
        first,
        (*first, *turns[0], *between[0]),
        (*first, *turns[0], *between[0], *turns[1], *between[1]),
    ]
    facts = result.completion
    assert (facts.tokens, facts.sampled_tokens, facts.environment_tokens, facts.turns) == (24, 18, 4, 3)
    assert (facts.first_version, facts.last_version, facts.parts) == (3, 4, ())
    assert facts.logprob_sum == -1.25 * 2 - 0.375 - 1.25 - 0.125 - 0.75
    assert result.score == RIGHT
    # each turn has a seed and a cut of its own, and the room that is left of 22 tokens
    assert len({spec.seed for _, spec in engine.asked}) == 3
    assert [spec.max_tokens for _, spec in engine.asked] == [22, 12, 1]


SUM = said("</think>8=<eos>")
LAST = said("</think>2<eos>")


@pytest.mark.slow
def test_without_rewards_the_verifier_scores_the_last_response(tmp_path):
    result, engine, _ = completed(tmp_path, "Echo", SUM, LAST)
    assert result.score == RIGHT and result.completion.turns == 2
    assert engine.asked[1][0][-3:] == ids("8=<think>")


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, others, expected",
    [("Strict", True, "environment_raised"), ("Fails", True, CompletionLost), ("Strict", False, CompletionLost)],
)
def test_a_failure_is_lost_but_where_the_class_says_wrong_and_others_succeed(
    environment, others, expected, tmp_path, monkeypatch
):
    if others:
        monkeypatch.setattr(
            "megatron_scalerl.environments.episode_record.EpisodeRecord.others_succeed", lambda record, row: True
        )
    result, _, problem = completed(tmp_path, environment, said("</think>7=<eos>"), SUM, row=prompt(how="raise"))
    assert problem == ""
    if expected is CompletionLost:
        assert result.reason == "environment_raised" and "ZeroDivisionError" in str(result)
    else:
        assert result.score == wrong(expected)
        assert result.score.problem.endswith("ZeroDivisionError\n")
        assert (result.completion.turns, result.completion.truncated) == (2, False)


@pytest.mark.slow
def test_a_row_that_is_too_long_is_left_out_and_one_whose_environment_fails_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.episodes.OWN_FAILURES", 1)
    monkeypatch.setattr(
        "megatron_scalerl.environments.episode_record.EpisodeRecord.others_succeed", lambda record, row: True
    )
    for kind in ("Fails", "Strict"):
        result, engine, problem = completed(tmp_path, kind, row=prompt(how="reset"))
        assert (result.reason, engine.asked, problem) == ("environment_raised", [], "")
    prompts = small_recipe().prompts.model_dump() | {"max_prompt_tokens": 9}
    result, _, problem = completed(tmp_path, "Said", row=prompt(messages=[]), prompts=prompts)
    assert result.reason == "environment_prompt" and "have 10 tokens" in problem and problem.endswith("9")


@pytest.mark.slow
def test_what_a_limit_ends_is_truncated_and_ends_with_a_turn(tmp_path):
    section = {"name": "episode_environments:Echo", "workers": 1}
    by_turns, _, _ = completed(tmp_path, "", *[SUM] * 2, environment=section | {"max_turns": 2})
    # 4 sampled, 3 of the environment, 4 sampled: no room for a third turn in 14 tokens and those of one turn
    lengths = {"interruption": {"enabled": True, "thinking_tokens": [2, 2], "answer_tokens": 12}}
    by_tokens, _, _ = completed(tmp_path, "", *[SUM] * 3, environment=section, **lengths)
    turns = []

    async def second_hangs():
        turns.append(1)
        if len(turns) == 2:
            await asyncio.Event().wait()

    by_time, _, _ = completed(
        tmp_path, "", *[SUM] * 2, environment=section | {"episode_timeout_s": 3.0}, wait=second_hangs
    )
    for result, tokens in ((by_turns, 11), (by_tokens, 11), (by_time, 4)):
        assert result.completion.truncated and result.completion.tokens == tokens
        assert result.score == wrong("truncated")


@pytest.mark.slow
def test_an_environment_that_begins_differently_each_time_begins_the_episode_anew(tmp_path):
    """A step is refused, and the replay of the one before it gives something else."""
    count = tmp_path / "count"
    count.write_text("")
    row = prompt(how="changes", file=str(count))
    script = [said("</think>7=<eos>")] * 6
    result, engine, _ = completed(tmp_path, "Fails", *script, row=row)
    assert result.completion.turns == 4 and len(engine.asked) == 6
    assert engine.asked[2][0] == engine.asked[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rewards, last, score",
    [
        ((None, 0.5), "7", Score(correct=False, reward=0.5)),
        ((False, False), "7", wrong()),
        ((False, True), "7", RIGHT),
        ((0.5, True), "7", Score(correct=True, reward=1.5)),
        # what it has cost so far is not saved by breaking the environment, or by running out of turns
        ((-4.0, 3.0), "8", Score(correct=False, reward=-4.0, reason="environment_raised")),
        ((4.0, 3.0), "8", wrong("environment_raised")),
        ((-4.0, 0.0, 0.0), "7", Score(correct=False, reward=-4.0, reason="truncated")),
    ],
)
def test_what_several_rewards_are_together(rewards, last, score, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron_scalerl.environments.episode_record.EpisodeRecord.others_succeed", lambda record, row: True
    )
    section = {"name": "episode_environments:Pays", "workers": 1, "max_turns": 2}
    script = [said(f"</think>{digit}<eos>") for digit in ("7", last)]
    result, _, _ = completed(tmp_path, "", *script, row=prompt(rewards=rewards), environment=section)
    assert result.score == score
    answered = 1 if last == "8" else 2
    assert result.score.turn_rewards == tuple(float(reward or 0) for reward in rewards[:answered])


def test_thinking_that_does_not_end_counts_as_a_whole():
    trace = Trace(ids("7=<think>"))
    add(trace, "7=<think>", "7+2=9</think>9<eos>", 6)
    add(trace, "7=<think>7+2=9</think>9<eos>8", "7+2<eos>", 0)
    assert trace.thinking == 6 + 4


def add(trace, context, text, answer_start):
    """A turn of the policy after a context."""
    context = list(ids(context))
    with trace.turn(context) as part:
        trace.add(part, context, arrays(text, answer_start))


def test_an_episode_whose_history_is_rewritten_forks_by_exact_prefix():
    """The thinking 7+2 leaves the context after the first turn; each sampled token is in one part."""
    trace = Trace(ids("7;+2;-7=<think>"))
    add(trace, "7;+2;-7=<think>", "7+2=9</think>9<eos>", 6)
    add(trace, "7;+2;-7=9<eos>-7<think>", "</think>2<eos>", 1)
    trace.end = ENDS["done"]
    first, second = parts = trace.parts(Draw(seed=5, thinking_cut=4))
    assert tuple(first.token_ids) == ids("7+2=9</think>9<eos>") and first.loss_mask.all()
    # the prompt without its <think> is what both parts share
    assert trace.shared == [None, 8]
    assert tuple(second.token_ids) == ids("9<eos>-7<think></think>2<eos>")
    assert second.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert second.environment.tolist() == [[0, 5]]
    facts = facts_of_parts(parts, trace.shared)
    assert facts.parts == (
        Part(tokens=8, sampled_tokens=8, prompt_tokens=None),
        Part(tokens=8, sampled_tokens=3, prompt_tokens=8),
    )
    assert (facts.turns, facts.sampled_tokens, facts.truncated) == (2, 11, False)


def test_a_context_continues_the_longest_part_that_it_repeats_and_else_forks():
    """A sub-agent, two branches at once, a summary, an edited answer, and a turn that came to nothing."""
    trace = Trace(ids("7;+2=<think>"))
    main = "7;+2=<think>0<eos>"
    add(trace, "7;+2=<think>", "0<eos>", 0)
    add(trace, "7;-2=<think>", "1<eos>", 0)
    with trace.turn(list(ids(f"{main}3<think>"))):
        add(trace, f"{main}4<think>", "2<eos>", 0)
    add(trace, f"{main}4<think>2<eos>5<think>", "6<eos>", 0)
    add(trace, f"{main}3<think>", "7<eos>", 0)
    add(trace, "7;+2=8<think>", "8<eos>", 0)
    add(trace, "7;+2=<think>9<eos>5<think>", "9<eos>", 0)
    trace.end = ENDS["done"]
    parts = trace.parts(Draw(seed=5, thinking_cut=4))
    wholes = [(*trace.prompt[:shared], *part.token_ids) for shared, part in zip(trace.shared, parts, strict=True)]
    assert wholes == [
        ids(f"{main}3<think>7<eos>"),
        ids("7;-2=<think>1<eos>"),
        ids(f"{main}4<think>2<eos>5<think>6<eos>"),
        ids("7;+2=8<think>8<eos>"),
        ids("7;+2=<think>9<eos>5<think>9<eos>"),
    ]
    sampled = [token for part in parts for token, policy in zip(part.token_ids, part.loss_mask) if policy]
    assert sorted(sampled) == sorted(ids("0<eos>1<eos>2<eos>6<eos>7<eos>8<eos>9<eos>"))

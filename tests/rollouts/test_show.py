"""The viewer prints one completion with forced tokens and policy versions marked, with and without colour."""

from dataclasses import replace

import pytest
from command_line import command
from journals import write_journal
from rollout_groups import group_of, rollout
from stored_episodes import EPISODE, FORKED

from megatron_scalerl.commands import show as tool
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.tiny.tokenizer import save_tokenizer
from megatron_scalerl.types import Prompt, Score

main = command("show")
PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. "


def group(group_id):
    """Completion 0 is 7+2=9 and ends by itself; completion 1 is cut after `7+`, and the version changes there."""
    natural = rollout(tokens=(13, 16, 8, 19, 15, 4, 15, 2), versions=(3,) * 8, thinking_cut=5, seed=11)
    mask = (True, True, False, False, True, True)
    cut = {"interrupted": True, "thinking_cut": 2, "seed": 11}
    forced = rollout(tokens=(13, 16, 5, 4, 6, 2), versions=(3, 3, 4, 4, 4, 4), mask=mask, **cut)
    prompt = Prompt(prompt_id="p", text="7;+2=", answer="9", token_ids=(1, 13, 20, 16, 8, 19, 3))
    scores = (Score(correct=True, reward=1.0), Score(correct=False, reward=-1.0))
    return group_of((natural, forced), scores, prompt=prompt, group_id=group_id), (natural, forced)


def run_of(folder, *groups, **events):
    """A run's folder as the journal writes it."""
    save_tokenizer(folder / "policy")
    (folder / "recipe.yaml").write_text(f"policy:\n  path: {folder / 'policy'}\n")
    write_journal(folder, groups=groups, **events)
    return folder


def test_what_is_paid_and_not_confirmed_is_shown(tmp_path, capsys):
    listed, rollouts = group(0)
    denied = replace(listed, scores=(listed.scores[1], Score(correct=True, reward=1.0, confirmed=False)))
    assert main([str(run_of(tmp_path, (denied, rollouts), group(1))), "--unconfirmed"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("group      0,") and out[1].startswith("completion 1 of 2")
    assert out[2] == "reward     +1 (correct, but not confirmed by the second judge), reference 9"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Groups 0 to 2, of which 0 and 1 were trained."""
    batches = [BatchRecord(batch=n, step=n + 1, policy_version=n, group_ids=(n,)) for n in (0, 1)]
    return run_of(tmp_path_factory.mktemp("run"), *map(group, range(3)), batches=batches)


def test_the_newest_groups_first_completion_is_shown_without_arguments(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "group      2, epoch 0, in no batch yet, pass rate 1/2",
        "completion 0 of 2, 8 tokens, seed 11",
        "reward     +1 (right), reference 9",
        "thinking   limited to 5 tokens, not interrupted, not truncated",
        "versions   3 (tokens 0-7)",
        "prompt     <bos>7;+2=<think>",
        "‹v3›7+2=9</think>9<eos>",
    ]


def test_the_failure_of_an_environment_that_is_paid_is_shown(tmp_path, capsys):
    _, rollouts = group(0)
    score = Score(correct=False, reward=-1.0, reason="environment_raised", problem="Traceback ...\nValueError: b")
    failed = group_of(rollouts, (score, score), prompt=group(0)[0].prompt, group_id=0)
    assert main([str(run_of(tmp_path, (failed, rollouts)))]) == 0
    out = capsys.readouterr().out
    assert "reward     -1 (environment_raised)" in out and "failure    Traceback ...\nValueError: b\n" in out


def test_forced_tokens_and_versions_are_marked_without_colour(run_dir, capsys):
    assert main([str(run_dir), "--step", "2", "--index", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "group      1, epoch 0, in the batch of step 2, pass rate 1/2"
    assert out[2:5] == [
        "reward     -1 (wrong), reference 9",
        "thinking   cut after 2 tokens, interrupted, not truncated",
        "versions   3 (tokens 0-1), 4 (tokens 2-5)",
    ]
    assert out[-1] == f"‹v3›7+‹v4›⟦{PHRASE}</think>⟧0<eos>"


def test_text_that_looks_like_markup_is_printed_as_it_is():
    class BracketTokenizer:
        """Stands in for a tokenizer with brackets."""

        def decode(self, ids, **settings):
            return "[bold]x[/nothing]"

    rollout = {"token_ids": [0], "policy_versions": [1], "loss_mask": [True], "environment": (), "parts": {0: 0}}
    text = tool.marked_text(rollout, BracketTokenizer())
    assert text.plain == "‹v1›[bold]x[/nothing]"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """A run whose newest group has an episode of three turns, whole and forked."""
    made, (plain, _) = group(0)
    right, wrong = made.scores
    measured = replace(right, metrics={"found": 1.0, "short": 0.25})
    turns = group_of((EPISODE, FORKED, plain), (measured, wrong, wrong), prompt=made.prompt)
    return run_of(tmp_path_factory.mktemp("episodes"), (turns, (EPISODE, FORKED, plain)))


def test_what_the_environment_wrote_is_marked_and_counted(episodes, capsys):
    assert main([str(episodes)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:8] == [
        "group      0, epoch 0, in no batch yet, pass rate 1/3",
        "completion 0 of 3, 11 tokens, seed 0",
        "reward     +1 (right), reference 9",
        "thinking   cut after 1 tokens, interrupted, not truncated",
        "versions   3 (tokens 0-6), 4 (tokens 7-10)",
        "turns      3, 3 tokens of the environment",
        "metrics    found 1, short 0.25",
        "prompt     <bos>7;+2=<think>",
    ]
    text = f"‹v3›7⟦{PHRASE}</think>⟧\n⟪2=⟫\n0<eos>‹v4›\n⟪+⟫\n29<eos>\n"
    assert out.endswith(text)
    assert main([str(episodes), "--index", "2"]) == 0
    assert "turns" not in capsys.readouterr().out, "one turn"


def test_the_parts_of_a_forked_episode_stand_one_after_another(episodes, capsys):
    assert main([str(episodes), "--index", "1"]) == 0
    head, text = capsys.readouterr().out.split("<think>\n")
    assert "completion 1 of 3, 16 tokens, " in head and "turns      3, 8 tokens of the environment" in head
    assert text.splitlines() == [
        "",
        "part 1 of 3",
        f"‹v3›7⟦{PHRASE}</think>⟧",
        "part 2 of 3",
        "",
        "⟪</think>2=⟫",
        "0<eos>",
        "part 3 of 3",
        "‹v4›",
        "⟪</think>2=<eos>+⟫",
        "29<eos>",
    ]


def test_an_environment_does_not_steer_the_terminal(episodes):
    class HostileTokenizer:
        """Stands in for a tokenizer whose every text is hostile."""

        def decode(self, ids, **settings):
            return "[red]\x1b]0;x\x07\u202e</b>" if ids == [8, 19] else "."

    listed = tool.find_group(episodes, None, None)
    text = tool.marked_text(listed["rollouts"][0], HostileTokenizer())
    assert "\n⟪[red]\\x1b]0;x\\x07\\u202e</b>⟫\n" in text.plain and "\x1b" not in text.plain
    styles = {text.plain[span.start : span.end].strip()[0]: str(span.style) for span in text.spans}
    assert (styles["⟪"], styles["⟦"]) == ("green", "bold yellow")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--group", "9"], "none of the 3 finished groups matches --group"),
        (["--group", "1", "--step", "1"], "none of the 3 finished groups matches --group --step"),
        (["--index", "2"], "--index: the group has no completion 2; take one from 0 to 1"),
    ],
)
def test_what_is_not_there_is_one_line(run_dir, capsys, arguments, message):
    assert main([str(run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_interrupted_completion_can_be_asked_for(run_dir, capsys):
    assert main([str(run_dir), "--interrupted"]) == 0
    out = capsys.readouterr().out
    assert "completion 1 of 2" in out and "cut after 2 tokens, interrupted" in out
    assert main([str(run_dir), "--interrupted", "--index", "0"]) == 0
    assert "completion 0 of 2" in capsys.readouterr().out

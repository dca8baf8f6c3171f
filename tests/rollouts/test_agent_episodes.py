"""Agents that ask the policy over the route: real decoders, processes and verifier, and an engine with a script."""

import asyncio
import dataclasses
import json

import pytest
from chat_templates import QWEN3_TURNS
from scripted_episodes import QUESTION, THREE, completed, ids, prompt, said
from turn_policies import ids_of, save_policy
from waiting import passes

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.environments.episode_record import EpisodeRecord
from megatron_scalerl.types import CompletionLost, Score

pytestmark = pytest.mark.slow
RENDERED = (1, *ids(f"{QUESTION}<think>"))


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend("tests/rollouts")
    monkeypatch.setattr("megatron_scalerl.rewards.outages.PAUSES_S", (0.0, 0.0))


def row_of(**extra):
    """A prompt as the row is rendered."""
    return dataclasses.replace(prompt(**extra), token_ids=RENDERED)


def run(folder, kind, *script, row=None, options=(), **sections):
    """As `completed`, with an agent. options: of the environment."""
    section = {"name": f"agent_environments:{kind}", "workers": 1, "max_turns": 4, **dict(options)}
    return completed(folder, "", *script, row=row or row_of(), **{"environment": section} | sections)


def test_an_agent_by_messages_and_by_ids_gives_the_episode_of_reset_and_step(tmp_path):
    """The conversation that test_episodes computes by hand, three times."""
    by_step, engine, _ = completed(tmp_path, "Said", *THREE, row=prompt(messages=["2", "9"]))
    messages = [RENDERED, ids("2<think>"), ids("9<think>")]
    for kind, extra in (("Talks", {"messages": ["2", "9"]}), ("Ids", {"ids": messages})):
        result, other, _ = run(tmp_path, kind, *THREE, row=row_of(**extra))
        assert rollout_of(read(result.parts[0])) == rollout_of(read(by_step.parts[0]))
        assert result.completion == by_step.completion and result.prompt.token_ids == RENDERED
        assert other.asked == engine.asked
        assert result.score == Score(correct=True, reward=1.0)


CALL = """<tool_call>
{"name": "add", "arguments": {"a": 7, "b": 2}}
</tool_call>"""


def test_a_tool_by_messages_gives_the_episode_of_reset_and_step(tmp_path):
    tokenizer = save_policy(tmp_path, QWEN3_TURNS)
    rendered = "<|im_start|>user\n7+2?<|im_end|>\n<|im_start|>assistant\n<think>"
    row = dataclasses.replace(prompt(), text="7+2?", token_ids=tuple(ids_of(tokenizer, rendered)))
    script = [turn(tokenizer, f"\nadd\n</think>\n\n{CALL}<|im_end|>"), turn(tokenizer, "</think>9<|im_end|>")]
    prompts = {"path": "q", "chat_template": True, "think_start": "<think>", "think_end": "</think>"}
    lengths = {"enabled": True, "thinking_tokens": [400, 400], "answer_tokens": 400}
    results = []
    for kind in ("Adds", "AddsByChat"):
        result, engine, _ = run(
            tmp_path, kind, *script, row=row, prompts=prompts, interruption=lengths, tokenizer=tokenizer
        )
        assert result.score == Score(correct=True, reward=1.0)
        results.append((result, engine))
    (by_step, one), (by_chat, other) = results
    assert [context for context, _ in one.asked] == [context for context, _ in other.asked]
    text = tokenizer.decode(other.asked[1][0])
    assert text.count("<tools>") == 1 and text.endswith(
        f"<think>\nadd\n</think>\n\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n9\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    # the row's prompt has no tools: one token is what it shares with the context, and the rest is masked
    [part] = by_chat.completion.parts
    assert part.prompt_tokens == 1 and by_chat.prompt == row
    told, asked = (rollout_of(read(result.parts[0])) for result in (by_step, by_chat))
    first = len(by_step.prompt.token_ids) - 1
    assert (*row.token_ids[:1], *asked.token_ids) == (*by_step.prompt.token_ids, *told.token_ids)
    assert asked.loss_mask == (*(False,) * first, *told.loss_mask)
    assert asked.rollout_logprobs == (*(0.0,) * first, *told.rollout_logprobs)
    assert asked.environment[0] == (0, first) and by_chat.completion.turns == 2
    assert by_chat.completion.sampled_tokens == by_step.completion.sampled_tokens


def turn(tokenizer, text):
    """As `said`, of another policy."""
    token_ids = ids_of(tokenizer, text)
    spans = [{"version": "3", "start": 0, "end": len(token_ids)}]
    return {"token_ids": token_ids, "logprobs": [-0.5] * len(token_ids), "weight_versions": spans}


def test_an_agent_that_forks_in_every_way_has_each_sampled_token_in_the_loss_once(tmp_path):
    texts = [f"</think>{digit}<eos>" for digit in "01234567"]
    spans = [((3, None),)] * 4 + [((4, None),), ((3, None),), *[((4, None),)] * 2]
    both = asyncio.Event()

    async def wait():
        asked.append(1)
        if len(asked) == 5:
            both.set()
            await passes()  # the first of both is answered first
        if len(asked) >= 4:
            await both.wait()

    asked = []
    script = [said(text, versions=version) for text, version in zip(texts, spans, strict=True)]
    result, engine, _ = run(tmp_path, "Forks", *script, wait=wait, options={"max_turns": 8})
    assert not isinstance(result, CompletionLost), result
    turns = [ids(text) for text in texts]
    begin, third = (1, *ids("7+2=<think>")), ids("3<think>")
    main = (*begin, *turns[0], *third, *turns[2])
    contexts = [context for context, _ in engine.asked]
    # the branches come in either order
    order = [contexts[n][len(main) :][:1] for n in (3, 4)]
    assert sorted(order) == [ids("4"), ids("5")]
    branches = [(*main, *ids(f"{TOKEN[0]}<think>")) for TOKEN in (("4",), ("5",))]
    if order[0] == ids("5"):
        branches.reverse()
    summary = (1, *ids("7+2=;8<think>"))
    edited = (*begin, *turns[0], *ids("6<think>"))
    rewritten = (*begin[:-1], *ids("73<think>"))
    sub_agent = (1, *ids("9-2=<think>"))
    assert contexts == [
        begin, sub_agent, (*begin, *turns[0], *third), *branches, summary, edited, rewritten
    ]  # fmt: skip
    expected = [
        (*branches[0], *turns[3]), (*sub_agent, *turns[1]), (*branches[1], *turns[4]), (*summary, *turns[5]),
        (*edited, *turns[6]), (*rewritten, *turns[7]),
    ]  # fmt: skip
    parts = [rollout_of(read(part)) for part in result.parts]
    wholes = [
        (*RENDERED[: fact.prompt_tokens], *part.token_ids) for fact, part in zip(result.completion.parts, parts)
    ]
    assert sorted(wholes) == sorted(expected)
    sampled = [
        token for part in parts for token, sampled in zip(part.token_ids, part.loss_mask, strict=True) if sampled
    ]
    assert sorted(sampled) == sorted(token for turn in turns for token in turn)
    facts = result.completion
    assert (facts.turns, facts.sampled_tokens, facts.first_version, facts.last_version) == (8, 24, 3, 4)
    # one reward, and so one advantage and one weight, for the episode
    assert result.score == Score(correct=False, reward=0.5)


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_what_was_asked_before_a_failure_is_answered_from_the_record(how, tmp_path):
    (tmp_path / "count").write_text("")
    row = row_of(file=str(tmp_path / "count"), how=how, then="same")
    result, engine, _ = run(tmp_path, "Again", said("</think>7<eos>"), said("</think>2<eos>"), row=row)
    assert result.score == Score(correct=True, reward=1.0) and result.completion.turns == 2
    assert len(engine.asked) == 2 and (tmp_path / "count").read_text() == "xx"


@pytest.mark.parametrize("then", ["other", "less"])
def test_a_run_that_asks_something_else_after_a_failure_begins_anew(then, tmp_path):
    (tmp_path / "count").write_text("")
    row = row_of(file=str(tmp_path / "count"), how="raise", then=then)
    result, engine, _ = run(tmp_path, "Again", *[said("</think>7<eos>")] * 5, row=row)
    assert result.score == Score(correct=True, reward=1.0) and result.completion.turns == 2
    assert len(engine.asked) == {"other": 5, "less": 3}[then] and (tmp_path / "count").read_text() == "xxx"


def hostile(folder, how, script, **options):
    return run(folder, "Hostile", *script, row=row_of(how=how, folder=str(folder)), options=options)


TURN = said("</think>2<eos>")


def test_what_is_refused_says_why_and_the_episode_goes_on(tmp_path):
    result, engine, _ = hostile(tmp_path, "refused", [TURN] * 2, max_turns=16)
    assert result.completion.turns == 2 and len(engine.asked) == 2
    answers = json.loads((tmp_path / "refused.json").read_text())
    assert [status for status, _ in answers] == [400] * 10 + [413]
    words = ["n:", "$.stop[0]", "image_url", "messages:", "prompts.chat_template", "token_ids:", "token_ids", "n:"]
    for word, (_, text) in zip([*words, "", "", "4194304"], answers, strict=True):
        assert word in text, (word, text)


def test_the_ids_of_another_session_are_a_context_without_a_loss(tmp_path):
    result, _, _ = hostile(tmp_path, "ids", [TURN] * 3)
    assert (result.completion.turns, result.completion.sampled_tokens) == (3, 9)
    assert [part.sampled_tokens for part in result.completion.parts] == [6, 3]


@pytest.mark.parametrize(
    ("how", "turns", "options"),
    [("million", 1, {}), ("refused", 1, {"max_turns": 4})],
)
def test_what_a_limit_ends_is_truncated(how, turns, options, tmp_path):
    result, engine, _ = hostile(tmp_path, how, [TURN] * 2, **options)
    assert result.completion.truncated and result.completion.turns == len(engine.asked) == turns
    assert result.score == Score(correct=False, reward=-1.0, reason="truncated")


def test_an_agent_that_asks_too_much_at_first_or_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.episodes.OWN_FAILURES", 1)
    result, engine, problem = hostile(tmp_path, "nothing", [])
    assert (result.reason, engine.asked, problem) == ("environment_silent", [], "")
    result, _, problem = run(tmp_path, "Ids", row=row_of(ids=[[1] * 400]))
    assert result.reason == "environment_prompt" and "environment.episode_tokens" in problem


@pytest.mark.parametrize(("how", "reason"), [("nan", "invalid"), ("hang", "hung")])
def test_an_agent_that_fails_is_lost_and_nothing_is_sampled_again(how, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.environments.pool.GRACE_S", 0.5)
    result, engine, _ = hostile(tmp_path, how, [TURN] * 2, timeout_s=2.0)
    assert result.reason == f"environment_{reason}"
    assert len(engine.asked) == (2 if how == "nan" else 1)


def test_a_failure_of_an_agent_that_says_so_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(EpisodeRecord, "others_succeed", lambda record, row: True)
    result, _, _ = run(tmp_path, "Strict", *[TURN] * 2, row=row_of(how="nan", folder=str(tmp_path)))
    assert result.score == Score(correct=False, reward=-1.0, reason="environment_invalid")
    assert result.completion.turns == 2 and not result.completion.truncated

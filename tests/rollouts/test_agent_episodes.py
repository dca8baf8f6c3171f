"""Agents that ask the policy over the route: real decoders, processes and verifier, and an engine with a script."""

import dataclasses

import pytest
from chat_templates import QWEN3_TURNS
from scripted_episodes import QUESTION, RIGHT, THREE, completed, ids, prompt, said, wrong
from turn_policies import ids_of, save_policy

from megatron_scalerl.batching.rollout_bytes import read, rollout_of

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
        assert result.score == RIGHT


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
        assert result.score == RIGHT
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


@pytest.mark.parametrize(
    "how, then, asked, tries",
    [("raise", "same", 2, 2), ("exit", "same", 2, 2), ("raise", "other", 5, 3), ("raise", "less", 3, 3)],
)
def test_what_was_asked_before_a_failure_is_answered_from_the_record(how, then, asked, tries, tmp_path):
    """A run that asks something else after it, or less, begins anew."""
    (tmp_path / "count").write_text("")
    row = row_of(file=str(tmp_path / "count"), how=how, then=then)
    result, engine, _ = run(tmp_path, "Again", *[said("</think>7<eos>")] * 5, row=row)
    assert result.score == RIGHT and result.completion.turns == 2
    assert len(engine.asked) == asked and (tmp_path / "count").read_text() == "x" * tries


def test_an_agent_that_asks_nothing_or_too_much_at_first_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.episodes.OWN_FAILURES", 1)
    result, engine, problem = run(tmp_path, "Ids", row=row_of(ids=[]))
    assert (result.reason, engine.asked, problem) == ("environment_silent", [], "")
    result, _, problem = run(tmp_path, "Ids", row=row_of(ids=[[1] * 400]))
    assert result.reason == "environment_prompt" and "environment.episode_tokens" in problem


def test_an_agent_that_fails_and_says_so_is_wrong_and_nothing_is_sampled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "megatron_scalerl.environments.episode_record.EpisodeRecord.others_succeed", lambda record, row: True
    )
    script = [said("</think>7<eos>"), said("</think>2<eos>")]
    result, engine, _ = run(tmp_path, "Strict", *script, row=row_of(messages=["3"], reward="no number"))
    assert result.score == wrong("environment_invalid")
    assert result.completion.turns == len(engine.asked) == 2 and not result.completion.truncated


def test_an_agent_that_asks_too_often_is_truncated(tmp_path):
    script = [said("</think>7<eos>"), said("</think>2<eos>")]
    result, engine, _ = run(tmp_path, "Talks", *script, row=row_of(messages=["3", "4"]), options={"max_turns": 2})
    assert result.completion.truncated and result.completion.turns == len(engine.asked) == 2
    assert result.score == wrong("truncated")

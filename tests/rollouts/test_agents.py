"""Agents that ask the policy over the route: real decoders, processes and verifier, and an engine with a script."""

import dataclasses

import pytest
from test_episodes import QUESTION, THREE, completed, ids, prompt

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.types import Score

pytestmark = pytest.mark.slow
RENDERED = (1, *ids(f"{QUESTION}<think>"))


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend("tests/rollouts")


def row_of(**extra):
    """A prompt as the row is rendered."""
    return dataclasses.replace(prompt(**extra), token_ids=RENDERED)


def run(folder, kind, *script, row=None, **sections):
    """As `completed`, with an agent."""
    section = {"name": f"agent_environments:{kind}", "workers": 1, "max_turns": 4}
    return completed(folder, "", *script, row=row or row_of(), **{"environment": section} | sections)


def test_an_agent_by_messages_and_by_ids_gives_the_episode_of_reset_and_step(tmp_path):
    """The conversation that test_episodes computes by hand, three times."""
    said, engine, _ = completed(tmp_path, "Said", *THREE, row=prompt(messages=["2", "9"]))
    messages = [RENDERED, ids("2<think>"), ids("9<think>")]
    for kind, extra in (("Talks", {"messages": ["2", "9"]}), ("Ids", {"ids": messages})):
        result, other, _ = run(tmp_path, kind, *THREE, row=row_of(**extra))
        assert rollout_of(read(result.parts[0])) == rollout_of(read(said.parts[0]))
        assert result.completion == said.completion and result.prompt.token_ids == RENDERED
        assert other.asked == engine.asked
        assert result.score == Score(correct=True, reward=1.0)

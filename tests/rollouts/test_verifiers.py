"""Environments of verifiers: a real environment server, decoders and processes, and an engine with a script."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.scripted_engine import StandInScriptedEngine
from own_processes import own_processes
from scripted_episodes import completed, episodes_recipe, ids, outcome, said, sampler_of
from waiting import until

from megatron_scalerl.batching.rollout_bytes import read, rollout_of
from megatron_scalerl.environments.pool import EnvironmentPool
from megatron_scalerl.environments.verifiers import FOLDER
from megatron_scalerl.environments.worker import load
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.types import CompletionLost, Prompt, Score

LIBRARY = Path(sys.prefix).parent / FOLDER
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not list(LIBRARY.glob("lib/python*/site-packages/verifiers-*")),
        reason="needs verifiers: tools/install.sh environments",
    ),
]
GUESSES = [said("</think>5<eos>"), said("5</think>8<eos>"), said("</think>7<eos>")]


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "examples/taskset:tests/rollouts")


def settings(folder, client):
    """environment.name of the game with faults."""
    (folder / "game.toml").write_text(f'[env.taskset]\nid = "guess_faults"\n[client]\n{client}\n')
    return f"verifiers:{folder / 'game.toml'}"


def ids_client(folder):
    """The client that sends ids."""
    return (
        'type = "train"\nrenderer = {name = "custom", import_path = "guess.TinyRenderer"}\n'
        f'renderer_model_name = "{folder}"'
    )


def game(folder, **changes):
    """A game with 7, in the range 2..8."""
    task = {"prompt": "2;8=", "number": 7, "file": str(folder / "trace.json"), **changes}
    tokens = (1, *ids("2;8=<think>"))
    return Prompt(prompt_id="p", text="2;8=", answer="its key", token_ids=tokens, extra={"task_data": task})


def section(folder, client):
    return {"name": settings(folder, client), "workers": 1, "max_turns": 4, "timeout_s": 300}


def played(folder, client, *script, wait=None, **changes):
    """As `completed`: the game."""
    return completed(folder, "", *script, row=game(folder, **changes), wait=wait, environment=section(folder, client))


def check(result, engine):
    """Check an episode of three turns; the tokens of its context and of its last turn."""
    rollout = rollout_of(read(result.parts[0]))
    turns = [ids("</think>5<eos>"), ids("5</think>8<eos>"), ids("</think>7<eos>")]
    context = (1, *ids("2;8=<think>"), *turns[0], *ids("+<think>"), *turns[1], *ids("-<think>"))
    assert len(engine.asked) == 3 and engine.asked[-1][0] == context
    tokens = (*context, *turns[2])
    assert result.prompt.token_ids + rollout.token_ids == tokens
    assert sum(rollout.loss_mask) == 3 + 4 + 3
    assert result.score == Score(correct=False, reward=0.5)
    return tokens


def test_a_trace_of_the_library_equals_the_record_token_by_token(tmp_path):
    result, engine, _ = played(tmp_path, ids_client(tmp_path), *GUESSES)
    tokens = check(result, engine)
    ((token_ids, mask, logprobs),) = json.loads((tmp_path / "trace.json").read_text())
    assert tuple(token_ids) == tokens
    rollout = rollout_of(read(result.parts[0]))
    shared = len(result.prompt.token_ids)
    assert not any(mask[:shared])
    assert tuple(mask[shared:]) == rollout.loss_mask and tuple(logprobs[shared:]) == rollout.rollout_logprobs


def test_a_taskset_that_raises_loses_the_episode(tmp_path):
    lost, engine, _ = played(tmp_path, 'type = "eval"', *GUESSES, fails=True)
    assert isinstance(lost, CompletionLost) and lost.reason == "environment_raised"
    assert "ZeroDivisionError: no score" in str(lost)
    assert len(engine.asked) == 3  # the next tries were answered from the record


def test_a_killed_environment_server_loses_nothing_and_pays_nothing(tmp_path):
    """SIGKILL while the second turn is sampled: what the policy said before, and says then, is used once.

    With messages the record is that of `test_a_trace_of_the_library_equals_the_record_token_by_token`, with ids.
    """
    turns = []
    killed = []

    async def kill():
        turns.append("a turn")
        if len(turns) == 2:
            [server] = own_processes(lambda process: process.cmdline()[3:4] == ["serve"])
            server.kill()
            killed.append(server.pid)

    result, engine, _ = played(tmp_path, 'type = "eval"', *GUESSES, wait=kill)
    check(result, engine)
    assert len(killed) == 1


def test_two_games_at_once_have_their_own_turns_and_a_cancelled_one_ends_in_the_server(tmp_path):
    """A turn of one is sampled with that of the other. The second has a score that takes for ever."""
    recipe = episodes_recipe(tmp_path, "", environment=section(tmp_path, 'type = "eval"'))
    end = tmp_path / "end"
    rows = game(tmp_path), game(tmp_path, hangs=True, number=8, file=str(end))
    scripts = GUESSES, [GUESSES[0], said("5</think>7<eos>"), said("</think>8<eos>")]

    async def main():
        together = asyncio.Barrier(2)
        engines = [StandInScriptedEngine(*script, wait=together.wait) for script in scripts]
        async with sampler_of(recipe) as sampler:
            first, second = (
                asyncio.create_task(outcome(sampler, *both, n))
                for n, both in enumerate(zip(engines, rows, strict=True))
            )
            result = await first
            assert await until(lambda: end.exists() and end.read_text()) == "scored"
            second.cancel()
            await asyncio.wait([second])
            await until(lambda: end.read_text() == "cancelled")
        return result, engines

    result, engines = asyncio.run(main())
    check(result, engines[0])
    assert len(engines[1].asked) == 3


def test_names_that_cannot_be_used_are_refused_in_a_line(tmp_path):
    tables = {"nosuch": "taskset.id = 'nosuch'", "setting": "taskset = {id = 'guess', setting = 1}"}
    tables["several agents or attempts"] = "id = 'best-of-n'\ntaskset.id = 'guess'"
    tables[r"agent\.runtime"] = "taskset.id = 'guess'\nagent.harness.id = 'bash'"  # which executes
    for words, table in tables.items():
        (tmp_path / "wrong.toml").write_text(f"[env]\n{table}\n")
        with pytest.raises(ValueError, match=words) as problem:
            load(f"verifiers:{tmp_path / 'wrong.toml'}")
        assert "\n" not in str(problem.value) and "environment.name" in str(problem.value)


def test_a_server_that_does_not_start_ends_the_run_in_a_line(tmp_path, monkeypatch):
    """The library's check takes a taskset without tasks, and its server does not."""
    (tmp_path / "unfit.py").write_text(
        "import verifiers.v1 as vf\n"
        "from guess import GuessEnv, GuessHarness, GuessTask\n"
        "__all__ = ['UnfitTaskset', 'GuessEnv', 'GuessHarness']\n"
        "class UnfitTaskset(vf.Taskset[GuessTask]): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"examples/taskset:{tmp_path}")

    async def start():
        async with EnvironmentPool(EnvironmentSection(name="verifiers:unfit", workers=1), logs=tmp_path):
            pass

    with pytest.raises(ValueError, match=r"^environment\.name 'verifiers:unfit': .*ProcessDied") as problem:
        asyncio.run(start())
    assert "\n" not in str(problem.value)
    assert "abstract method 'load'" in (tmp_path / "environment-0.log").read_text()


def test_rows_are_those_of_the_taskset():
    command = [sys.executable, "-m", "megatron_scalerl.environments.verifiers", "guess"]
    rows = [json.loads(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.splitlines()]
    games = {(row["prompt"], row["task_data"]["number"]) for row in rows}
    assert len(games) == len({row["answer"] for row in rows}) == len(rows) == 140 and ("2;8=", 7) in games

"""Agents of engines on other hosts as real processes, with stand-in servers: none of them is ever left behind."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine.engine_recipes import recipe_for
from json_lines import write
from launch import other_hosts
from launch.other_hosts import SECRET, STAND_IN_HOST, agents, engines_of, none_left, with_children
from launch.stand_ins import environment
from waiting import until

from megatron_scalerl.commands import engine
from megatron_scalerl.commands.engine import has_ended
from megatron_scalerl.controller import run_folder as run_folder_module
from megatron_scalerl.engine.client import SamplingSpec
from megatron_scalerl.engine.membership import EngineState
from megatron_scalerl.engine.watchdog import EngineDied
from megatron_scalerl.launch import engines as engines_module
from megatron_scalerl.recipe.file import dump_recipe
from megatron_scalerl.tiny.policy import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parents[1] / "fakes/run_with_stand_ins.py"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    make_llama(folder, 0)
    return folder


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch, tmp_path):
    for name, value in environment(STAND_IN_SERVERS="1", STAND_IN_DOWN=str(tmp_path / "down")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engines_module, "FIRST_DELAY_S", 0.1)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def lose_host_b(run_folder):
    """The host does not answer any more, and its agent is gone."""
    down = run_folder.parent / "down"
    down.mkdir()
    (down / "b").touch()
    agents(run_folder)["engine-0"].kill()


async def generate(client):
    return await client.generate([1, 5], sampling=SamplingSpec(max_tokens=100, seed=3))


def check_secrets(folder, processes):
    """The server alone has the secret in its environment, nobody in a command line; files with it are private."""
    assert [SECRET in process.environ().values() for process in processes] == [False, True]
    for process in with_children(psutil.Process()) + processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # one of this process's other children may end meanwhile
            assert not any(SECRET in word for word in process.cmdline())
    files = sorted((folder / "control").iterdir())
    assert [(file.name, file.stat().st_mode & 0o777) for file in files] == [
        ("controller.json", 0o600),
        ("secret", 0o600),
    ]


async def test_a_killed_agent_takes_its_server_along_and_a_killed_server_is_reported(policy, run_folder, caplog):
    changes = []
    async with engines_of(recipe_for(policy), run_folder, changes.append) as engines:
        assert engines.members.stale[0].url.startswith("https://127.0.0.2:")
        first = with_children(agents(run_folder)["engine-0"])
        check_secrets(run_folder, first)
        first[0].kill()
        await engines.members.until(lambda: engines.members.members[0].restarts == 1 and engines.members.stale)
        await none_left(first)
        assert re.search(r"^engine-0 \(host b\) (lost|exited)", changes[1].reason), changes[1]
        agent, server = with_children(agents(run_folder)["engine-0"])
        server.kill()
        await engines.members.until(lambda: engines.members.members[0].restarts == 2 and engines.members.stale)
        await none_left([agent])
        assert (await generate(engines.members.stale[0])).token_ids
        last = with_children(agents(run_folder)["engine-0"])
        assert len(last) == 2
    await none_left(last)
    assert [str(change.state) for change in changes] == ["stale", "draining", "lost", "starting"] * 2 + ["stale"]
    assert changes[5].reason == "engine-0 (host b) exited with code -9"
    assert f"exited with code -9; the end of {run_folder}/logs/engine-0.log" in caplog.text


def controller_process(policy, run_folder, **env):
    """A controller as a process of its own, once its engine is up."""
    (run_folder / "given.yaml").write_text(dump_recipe(recipe_for(policy)))
    argv = [sys.executable, other_hosts.__file__, str(run_folder)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment(**env))
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize(
    "number, limits",
    [
        pytest.param(signal.SIGKILL, {}, id="gone"),
        pytest.param(signal.SIGSTOP, {"STAND_IN_LIMIT_S": "20"}, id="cut off", marks=pytest.mark.full),
    ],
)
def test_a_controller_that_is_gone_or_cut_off_leaves_no_agent(policy, run_folder, number, limits):
    """Stopped, it stands for one whose network is gone: the connection stays open, heartbeats do not arrive.

    The limit binds the start, too, which may wait for a core.
    """
    controller = controller_process(policy, run_folder, **limits)
    try:
        processes = with_children(agents(run_folder)["engine-0"])
        controller.send_signal(number)
        asyncio.run(none_left(processes))
    finally:
        controller.kill()
        controller.wait()


async def test_an_agent_may_outlive_the_command_that_started_it(policy, run_folder, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.launch.agents.ANSWER_S", 0.5)
    async with engines_of(recipe_for(policy), run_folder) as engines:
        agent = agents(run_folder)["engine-0"]
        commands = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                commands += [child] if str(STAND_IN_HOST) in child.cmdline() else []
        for command in commands:
            command.kill()
        await none_left(commands)
        await until(lambda: not engines._processes[0].server.command.running)
        assert (await generate(engines.members.stale[0])).token_ids
        assert commands and agent.is_running()
        assert engines.members.stale and not engines.members.members[0].restarts


@pytest.mark.full
async def test_an_engine_whose_host_is_away_for_a_while_is_not_given_up(policy, run_folder, tmp_path):
    recipe = recipe_for(policy, engine={"vllm": {"max_model_len": 2048}, "max_restarts": 1})
    async with engines_of(recipe, run_folder) as engines:
        lose_host_b(run_folder)
        log = run_folder / "logs/agent-0.log"
        await until(lambda: log.read_text().count("no route to host") >= 3)
        (tmp_path / "down/b").unlink()
        await engines.members.until(lambda: bool(engines.members.stale))
        assert engines.members.members[0].restarts > recipe.engine.max_restarts


async def test_an_engine_whose_host_has_left_the_job_is_given_up_at_once(policy, run_folder, monkeypatch):
    """`Hosts.have_left` is a stand-in for Slurm here."""
    monkeypatch.setattr("megatron_scalerl.launch.hosts.Hosts.have_left", lambda self: {"b"})
    held = []
    async with engines_of(recipe_for(policy), run_folder) as engines:
        engines.members.on_devices = held.append
        lose_host_b(run_folder)
        with pytest.raises(EngineDied, match=r"0 engines .*\(engine-0: Slurm removed its host from the job"):
            await engines.watch()
    assert held == [0]


@pytest.mark.full
async def test_an_engine_whose_host_is_gone_is_given_up_and_its_devices_are_not_held(policy, run_folder, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.launch.engines.UNREACHED_S", 3.0)
    recipe = recipe_for(policy, engine={"vllm": {"max_model_len": 2048}, "max_restarts": 2})
    held = []
    async with engines_of(recipe, run_folder) as engines:
        engines.members.on_devices = held.append
        assert engines.members.devices == 1
        lose_host_b(run_folder)
        with pytest.raises(EngineDied, match=r"0 engines .*\(engine-0: engine-0 \(host b\) lost the command .* 1\)"):
            await engines.watch()
        assert "no route to host" in (run_folder / "logs/agent-0.log").read_text()
    assert held == [0]


def joining(run_folder, **env):
    argv = [sys.executable, str(PROGRAM), "engine", "--join", str(run_folder), "--devices", "2"]
    return subprocess.Popen(argv, env={**os.environ, "MSRL_BIND_HOST": "127.0.0.4", **env})


async def test_an_engine_joins_leaves_and_joins_again_until_the_run_has_ended(policy, run_folder):
    held = []
    async with engines_of(recipe_for(policy), run_folder) as engines:
        members = engines.members
        members.on_devices = held.append
        joined = joining(run_folder, SLURM_JOB_ID="77", SLURM_STEP_ID="3")
        try:
            await members.until(lambda: len(members.stale) == 2)
            assert [(m.name, m.devices, m.joined) for m in members.members] == [
                ("engine-0", 1, False),
                ("extra-77-3", 2, True),
            ]
            client = members.members[1].client
            assert client.url.startswith("https://127.0.0.4:") and members.left == 2
            assert (await generate(client)).token_ids == (await generate(members.stale[0])).token_ids
            processes = with_children(agents(run_folder)["extra-77-3"])
            processes[0].kill()
            await members.until(lambda: members.members[1].state is EngineState.LOST)
            assert members.left == 1 and not members.members[1].given_up
            await none_left(processes)
            await members.until(lambda: len(members.stale) == 2)
            assert members.members[1].restarts == 1 and len(members.members) == 2
            members.evict(members.members[1].client, "garbage")
            await members.until(lambda: members.members[1].state is EngineState.LOST)
            await members.until(lambda: len(members.stale) == 2)
            (run_folder / "end.json").write_text('{"reason": "done", "incarnation": "local.0"}\n')
        except BaseException:
            joined.kill()
            raise
    assert await asyncio.to_thread(joined.wait, 180) == 0
    assert held == [3, 1, 3, 1, 3, 1]
    await none_left(list(agents(run_folder).values()))
    assert agents(run_folder) == {}


@pytest.mark.full
async def test_no_engine_joins_a_deterministic_run(policy, run_folder, monkeypatch):
    deterministic = {"deterministic": True, "max_staleness_steps": 0}
    async with engines_of(recipe_for(policy, rollouts=deterministic), run_folder) as engines:
        joined = joining(run_folder, SLURM_JOB_ID="7")
        log = run_folder / "logs/extra-7-0.log"
        await until(lambda: log.exists() and "refused this process" in log.read_text())
        joined.terminate()
        await asyncio.to_thread(joined.wait, 180)
        assert "rollouts.deterministic: the run keeps the engines" in log.read_text()
        assert len(engines.members.members) == 1


def test_an_end_of_an_earlier_attempt_does_not_end_a_run_that_was_extended(run_folder):
    assert (engine.ATTEMPTS, engine.END) == (run_folder_module.ATTEMPTS, run_folder_module.END)
    rows = [{"run_id": "run", "incarnation": f"local.{number}"} for number in range(2)]
    write(run_folder / "attempts.jsonl", rows)
    assert not has_ended(run_folder)
    (run_folder / "end.json").write_text(json.dumps({"reason": "done", "incarnation": "local.0"}) + "\n")
    assert not has_ended(run_folder)
    (run_folder / "end.json").write_text(json.dumps({"reason": "done", "incarnation": "local.1"}) + "\n")
    assert has_ended(run_folder)

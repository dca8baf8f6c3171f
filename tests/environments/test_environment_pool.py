"""Episodes in processes that work: what goes in and out, many at once, the start and the end of a pool."""

import asyncio
import os

import psutil
import pytest
from environment_pools import counted, played, pool_of, section
from own_processes import own_processes
from users_environments import TOOL
from waiting import until

from megatron_scalerl.environments.pool import EnvironmentFailed, EnvironmentPool, try_out
from megatron_scalerl.environments.response import Response, ToolCall
from megatron_scalerl.types import Prompt

PROMPT = Prompt(prompt_id="p", text="True", answer="7", token_ids=(1,), extra={"first": "'x'"})


@pytest.mark.parametrize("name", ["Counting", "CountingAsync"])
async def test_three_steps(name, tmp_path):
    async with pool_of(name, tmp_path) as pool:
        assert await played(pool, {"start": 5}, ["1", "2", "95"]) == counted(5, 1, 2, 95)
        assert pool.counters == {"episodes": 1, "steps": 3}
        declared = (pool.tools, pool.repeated_failure)
    assert declared == (([TOOL], "wrong") if name == "CountingAsync" else ([], "lost"))


async def test_fifty_episodes_step_at_once_in_one_process(tmp_path):
    """No step returns before all 50 are in progress."""
    async with pool_of("Meeting", tmp_path) as pool:
        rows = [{"start": n, "parties": 50} for n in range(50)]
        turns = await asyncio.gather(*(played(pool, row, ["1", "2"]) for row in rows))
        assert turns == [counted(n, 1, 2) for n in range(50)]
        assert len(pool.pids) == 1


async def test_an_episode_goes_to_the_process_with_the_fewest(tmp_path):
    async with pool_of("Counting", tmp_path, workers=3) as pool:
        episodes = [pool.episode({}) for _ in range(6)]
        for episode in episodes:
            await episode.reset()
        assert [len(process.episodes) for process in pool._processes] == [2, 2, 2]
        async with episodes[0]:
            assert (await episodes[0].step(Response(text="1"))).reward == 1.0
        assert sorted(len(process.episodes) for process in pool._processes) == [1, 2, 2]


MESSAGES = {
    "('x', True, False)": ((("user", "x"),), True),
    "({'role': 'tool', 'content': 'x'}, 1, False)": ((("tool", "x"),), 1.0),
    "([{'role': 'tool', 'content': 'x'}, {'role': 'user', 'content': 'y'}], None, 0 > 1)": (
        (("tool", "x"), ("user", "y")),
        None,
    ),
    "['x', __import__('numpy').float32(0.5), __import__('numpy').bool_(False)]": ((("user", "x"),), 0.5),
    r"('\udc80', None, False)": ((("user", "?"),), None),
    "('é' * 2**18, None, False)": ((("user", "é" * 2**18),), None),
}


async def test_messages_of_each_form(tmp_path):
    async with pool_of("Messages", tmp_path) as pool, pool.episode({"first": "['a']"}) as episode:
        with pytest.raises(EnvironmentFailed):
            await episode.reset()
        async with pool.episode({"first": "[{'role': 'system', 'content': 's'}]"}) as other:
            assert await other.reset() == ({"role": "system", "content": "s"},)
            for text, (messages, reward) in MESSAGES.items():
                turn = await other.step(Response(text=text))
                assert tuple((m["role"], m["content"]) for m in turn.messages) == messages
                assert turn.reward == reward and type(turn.reward) is type(reward)
            turn = await other.step(Response(text="([dict(role='tool', content='', tool_call_id='7')], 0.0, True)"))
            assert turn.messages == ({"role": "tool", "content": "", "tool_call_id": "7"},) and turn.done
            assert (await other.step(Response(text="([], None, True)"))).messages == ()


async def test_rows_and_responses_arrive(tmp_path):
    row = {"text": "q", "answer": "7", "task": "t", "n": float("nan"), "surrogate": "\ud800", "nested": [{"a": None}]}
    call = ToolCall(name="look", arguments={"at": [1, "\udc00"]}, raw="<x>", error="")
    async with pool_of("Echo", tmp_path) as pool, pool.episode(row) as episode:
        [first] = await episode.reset()
        assert first["content"] == repr(sorted({**row, "surrogate": "?"}.items()))
        turn = await episode.step(Response(text="hi", tool_calls=(call, ToolCall(error="json"))))
        seen = ToolCall(name="look", arguments={"at": [1, "?"]}, raw="<x>", error="")
        assert turn.messages[0]["content"] == repr(Response(text="hi", tool_calls=(seen, ToolCall(error="json"))))


async def test_what_an_environment_prints_is_in_its_log(tmp_path):
    async with pool_of("Counting", tmp_path) as pool:
        turns = await played(pool, {}, ["print", "shell", "1"])
        assert turns[-1] == ("now 1", 1.0, False)
    log = (tmp_path / "logs" / "environment-0.log").read_text()
    assert log.count("x" * 2**20) == 4 and "from a child" in log and "to stderr" in log


REFUSED = {
    "users_environments": "it has to be 'module:Class'",
    "no.such:Class": "the module cannot be imported: ModuleNotFoundError: No module named 'no'",
    "users_environments:Missing": "users_environments has no Missing",
    "users_environments:a_function": "it is a function; it has to be a class",
    "users_environments:NoStep": "the class has no method step",
    "users_environments:NoAgent": "run: it has to take .self, row, agent.; it is run.self, row.",
    "users_environments:NoRow": "reset: it has to take .self, row.; it is reset.self.",
    "users_environments:Yields": "reset is a generator, as it has a yield; return the result instead$",
    "users_environments:Configured": "it has to take ..; it is Configured.size.",
    "users_environments:BadTools": "tools has to be a list of JSON objects",
    "users_environments:BadRepeated": "tools has to be a list of JSON objects",
    "exiting:Class": "its process was not ready within 300 s .its exit with code 3.$",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_class_that_cannot_be_used_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exiting.py").write_text("import os; os._exit(3)")
    options = section("x").model_copy(update={"name": name, "workers": 2})
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        await EnvironmentPool(options, logs=tmp_path).__aenter__()
    assert f"environment.name {name!r}" in str(caught.value) and "\n" not in str(caught.value)
    assert own_processes(lambda process: "megatron_scalerl.environments.worker" in process.cmdline()) == []


async def test_a_variable_is_passed_only_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVIRONMENT_KEY", "secret")
    text = "(str(__import__('os').environ.get('ENVIRONMENT_KEY')), None, False)"
    for variables, value in (((), "None"), (("ENVIRONMENT_KEY",), "secret")):
        async with pool_of("Messages", tmp_path, variables=variables) as pool:
            assert (await played(pool, {"first": "'x'"}, [text]))[1] == (value, None, False)
    with pytest.raises(ValueError, match="the environment variable 'UNSET_KEY' is not set"):
        EnvironmentPool(section("Counting", variables=("UNSET_KEY",)), logs=tmp_path)


@pytest.mark.parametrize(
    "name, problem",
    [("Gymnasium", "step returned five values, as in Gymnasium"), ("DoneNumber", "Expected `bool`, got `int`")],
)
async def test_a_class_that_returns_no_turn_is_refused_before_the_run(name, problem):
    with pytest.raises(ValueError, match="the class returned no valid turn: .*" + problem) as refused:
        await try_out(section(name), PROMPT)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["Counting", "Echo", "Runs"])
async def test_a_class_that_returns_turns_or_raises_is_not_refused(name):
    await try_out(section(name), PROMPT)


async def test_memory_is_limited(tmp_path):
    async with pool_of("Messages", tmp_path, memory_mb=2000) as pool:
        turns = await played(pool, {"first": "'x'"}, ["(str(len(bytes(3 * 2**30))), None, False)"])
        assert turns.end.reason == "raised" and "MemoryError" in str(turns)


async def test_nothing_is_left_after_the_close(tmp_path):
    descriptors = set(os.listdir("/proc/self/fd"))
    async with pool_of("Counting", tmp_path, workers=2) as pool:
        await asyncio.gather(*(played(pool, {}, [f"once {tmp_path / 'died'}", "1"]) for _ in range(4)))
        waiting = asyncio.create_task(played(pool, {}, ["hang"]))
        await until(lambda: pool.counters["steps"] == 9)
        pids = pool.pids
        await pool.close()
        with pytest.raises(RuntimeError, match="the environment pool is closed"):
            await waiting
        await pool.close()
        with pytest.raises(RuntimeError, match="the environment pool is closed"):
            await played(pool, {}, [])
        assert len(pids) >= 2 and pool.pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(os.listdir("/proc/self/fd")) == descriptors

"""The client of an environment server of verifiers, whose server is a stand-in: starts, ends, cancellation."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from own_processes import own_processes
from waiting import passes, until

from megatron_scalerl.environments import verifiers
from megatron_scalerl.environments.response import Agent
from megatron_scalerl.environments.worker import Request, _reply, load

SERVER = Path(__file__).parent.parent / "fakes" / "environment_server.py"
AGENT = Agent(base_url="http://127.0.0.1:1/v1", api_key="k", model="policy")


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """`async with agents()`: the agent class of a stand-in, of which nothing is left at the end."""

    @asynccontextmanager
    async def started(*more):
        def command(_, name, address):
            return [sys.executable, str(SERVER), address, str(tmp_path / "pids"), *more]

        monkeypatch.setattr(verifiers, "command", command)
        kind = type("Verifiers", (verifiers.Verifiers,), {"name": "game", "client": {}})
        try:
            yield kind
        finally:
            if kind.server is not None:
                kind.server.life_task.cancel()
        await until(lambda: not servers())

    return started


def servers():
    """Servers and the processes between them and this one."""
    return own_processes(lambda process: any("environment_server.py" in word for word in process.cmdline()))


def written(folder):
    path = folder / "pids"
    return path.exists() and [int(pid) for pid in path.read_text().split()]


def row_of(*frames):
    """The row of a run that is answered so: (kind of the frame, object or bytes)."""
    encoded = [(name, data if isinstance(data, bytes) else msgspec.msgpack.encode(data)) for name, data in frames]
    return {"task_data": {"frames": encoded}}


def run_of(kind, *frames):
    return asyncio.create_task(kind().run(row_of(*frames), AGENT))


def scored(score, **head):
    """The frames of a run with this score."""
    rewards = {"rewards": {"found": {"score": score, "weight": 0.5}}, "metrics": {"turns": 3.0, "unscored": None}}
    if score is None:
        rewards = {"rewards": None}
    end = {"head": {"ok": True, "errors": []} | head, "traces": [{"id": "t"}], "error": None}
    return (b"delta", {"trace": "t", "set": rewards}), (b"reply", end)


async def test_cancelled_callers_start_one_server_and_the_next_one_hears_of_its_end(agents, tmp_path):
    async with agents("hang") as kind:
        for _ in range(3):
            call = run_of(kind)
            await passes()
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled()
        call = run_of(kind)
        [pid] = await until(lambda: written(tmp_path))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ConnectionError, match=r"environment\.name 'verifiers:game'.*ProcessDied"):
            await call
        await until(lambda: not servers())


async def test_a_start_that_hangs_ends_with_its_process(agents, monkeypatch):
    async with agents("hang") as kind:
        monkeypatch.setattr(verifiers, "START_S", 0.5)
        with pytest.raises(ConnectionError, match=r"TimeoutError.*0\.5 s"):
            await kind.start_server()
        await until(lambda: not servers())


async def test_a_folder_with_a_long_name_for_temporary_files_takes_a_server(agents, tmp_path, monkeypatch):
    async with agents() as kind:
        folder = tmp_path / ("d" * 100)
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        await kind.start_server()
        assert await run_of(kind, *scored(0.5)) == (0.25, {"turns": 3.0, "found": 0.5})


async def test_a_server_that_has_no_folder_says_why(agents, monkeypatch):
    def refuses(**_):
        raise OSError("no space")

    async with agents() as kind:
        monkeypatch.setattr("tempfile.mkdtemp", refuses)
        with pytest.raises(ConnectionError, match="no space"):
            await kind.start_server()


@pytest.mark.parametrize(
    "frame, cause", [((b"reply", {"traces": [{"id": "unknown"}]}), "KeyError"), ((b"reply", b"\xc1"), "DecodeError")]
)
async def test_garbage_ends_the_server_and_its_runs_say_why(frame, cause, agents, tmp_path):
    async with agents() as kind:
        calls = [run_of(kind), run_of(kind, frame)]
        for call in calls:
            with pytest.raises(ConnectionError, match=cause):
                await call
        assert (await run_of(kind, *scored(1.0)))[0] == 0.5
        old, new = written(tmp_path)
        await until(lambda: old not in [process.pid for process in servers()])
        assert new in [process.pid for process in servers()]


async def test_a_cancelled_run_is_cancelled_in_the_server_and_others_go_on(agents):
    async with agents() as kind:
        await kind.start_server()
        call, other = run_of(kind), run_of(kind)
        await passes()
        call.cancel()
        await asyncio.wait([call])
        heard = (await kind.ask("heard", {}))["heard"]
        (number, *_), (another, *_) = (entry for entry in heard if entry[1] == "run")
        assert number != another
        assert [request for _, method, request in heard if method == "cancel"] == [{"request_id": number}]
        assert not other.done()
        other.cancel()


@pytest.mark.parametrize(
    "frames, failure, error",
    [
        (scored(float("nan")), "invalid", "ValueError"),
        (scored(None), "raised", "LibraryFailed: the taskset"),
        (scored(1.0, ok=False), "raised", "LibraryFailed: the environment server"),
        (scored(1.0)[1:], "unavailable", "KeyError"),
        ([(b"reply", {"error": "TypeError: odd", "success": False})], "raised", "TypeError: odd"),
    ],
)
async def test_what_has_no_score_is_a_failure_that_says_why(frames, failure, error, agents):
    async with agents() as kind:
        request = Request(episode=1, row=row_of(*frames), agent=AGENT)
        reply = await _reply(request, kind, [], 5.0)
        assert reply.failure == failure and error in reply.error.splitlines()[-1]


def test_a_check_that_is_killed_refuses_the_name_in_a_line(monkeypatch):
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(verifiers, "command", lambda *_: command)
    with pytest.raises(ValueError, match=r"environment\.name 'verifiers:game': exit code -9"):
        load("verifiers:game")

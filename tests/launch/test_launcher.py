"""The launcher stops every process, whatever fails meanwhile, and starts an evicted engine again."""

import asyncio
import contextlib
import sys
from types import SimpleNamespace

import pytest
from aiohttp import web
from fakes.server import StandInServer
from launch.stand_ins import environment, gone, pids_in, stand_in
from recipe_files import small_recipe

from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.engine.answers import EngineLost
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.watchdog import EngineDied, watch_progress
from megatron_scalerl.launch import engines as engines_module
from megatron_scalerl.launch import local_server
from megatron_scalerl.launch import trainer as trainer_module
from megatron_scalerl.launch.engines import Engines
from megatron_scalerl.launch.hosts import ONE_HOST
from megatron_scalerl.launch.launcher import until_failure
from megatron_scalerl.launch.placement import Attempt, Placement
from megatron_scalerl.launch.trainer import TrainerRanks
from megatron_scalerl.processes.child_process import LOG_END, ChildProcess, ProcessDied, race
from megatron_scalerl.trainer.client import TrainerClient, TrainerError


@pytest.fixture
def run():
    """Runs a coroutine on the event loop of the launcher."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def recipe(tmp_path):
    """One engine and one trainer rank."""
    engine = {"stall_timeout_s": 0.2, "max_restarts": 2}
    return small_recipe(output_dir=str(tmp_path), weights={"transport": "gloo"}, engine=engine)


@pytest.fixture
def trainer(recipe, run):
    """A trainer that has not started anything."""
    folder = RunFolder(recipe)

    async def make(rendezvous):
        client = TrainerClient(
            world_size=1, run_id="r", incarnation="local.0", secret="secret" * 8, rendezvous=rendezvous
        )
        return TrainerRanks(recipe, folder.attempt, client, ONE_HOST, Placement.of(recipe, ONE_HOST))

    with private_folder() as rendezvous:
        trainer = run(make(rendezvous))
        yield trainer
        trainer.client.close()
        folder.close()


@pytest.mark.slow
@pytest.mark.parametrize("failure", [TrainerError("trainer rank 0: gone"), TimeoutError(), OSError("no socket")])
def test_a_failing_stop_of_the_trainer_leaves_no_child(trainer, run, tmp_path, monkeypatch, caplog, failure):
    async def scenario():
        async def stop():
            raise failure

        async def refuse():
            raise RuntimeError("cannot be stopped")

        monkeypatch.setattr(trainer.client, "stop", stop)
        monkeypatch.setattr(trainer_module, "_EXIT_S", 0.2)
        for name in ("trainer-0", "trainer-1", "trainer-2"):
            child = await ChildProcess.start(name, stand_in(tmp_path / "pids"), environment(), tmp_path / name)
            monkeypatch.setattr(child, "stop", lambda child=child: ChildProcess.stop(child, 0.3))
            trainer._children.append(child)
        last = trainer._children[-1]
        monkeypatch.setattr(last, "stop", refuse)
        groups = set(pids_in(tmp_path / "pids", 3))
        await trainer.stop(graceful=True)
        last.kill()
        await last.wait()
        return groups

    assert gone(run(scenario()))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 2
    assert "the run is finished, but its trainer did not stop gracefully" in lines[0] and "\n" not in lines[0]
    assert lines[1] == "trainer-2 could not be stopped: cannot be stopped"


def test_a_trainer_that_never_answers_the_stop_command_does_not_block_the_end(trainer, run, monkeypatch, caplog):
    async def scenario():
        monkeypatch.setattr(trainer_module, "_STOP_S", 0.2)
        monkeypatch.setattr(trainer.client, "stop", asyncio.Event().wait)
        await asyncio.wait_for(trainer.stop(graceful=True), 60)

    run(scenario())
    assert "its trainer did not stop gracefully: no answer" in caplog.text


def test_whoever_comes_second_is_cancelled_and_has_ended_when_the_race_is_over(run):
    async def scenario():
        ended = []

        async def late():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("late")

        kept, given = (asyncio.get_running_loop().create_future() for _ in range(2))
        given.set_result("first")
        with pytest.raises(KeyError, match="of the block"):
            async with race(late(), given, asyncio.shield(kept)) as (second, first, _):
                assert first.result() == "first" and not second.done()
                raise KeyError("of the block")
        return ended, kept.cancelled()

    assert run(scenario()) == (["late"], False)


def test_the_first_rank_that_exits_ends_the_work(trainer, run, tmp_path):
    async def scenario():
        argv = ["bash", "-c", "echo out of memory; exit 7"]
        trainer._children.append(await ChildProcess.start("trainer-0", argv, environment(), tmp_path / "log"))
        trainer._watches.append(asyncio.create_task(trainer._children[0].watch()))
        trainer._started.set()
        await until_failure(asyncio.Event().wait(), trainer.watch)

    with pytest.raises(ProcessDied, match=r"(?s)trainer-0 exited with code 7; the end of .*out of memory"):
        run(asyncio.wait_for(scenario(), 120))


class StandInProcess:
    """An engine process behind a stand-in server; `fail_starts` of them do not start."""

    def __init__(self, index, url, settings, fail_starts, log_path):
        self.server = SimpleNamespace(log_path=log_path, reached=True)
        self.name = f"engine-{index}"
        self.client = EngineClient(url=url, secret="s", name=self.name)
        self._settings, self._fail_starts = settings, fail_starts
        self.killed = False

    async def start(self):
        if self._fail_starts:
            self._fail_starts.pop()
            raise EngineDied(f"{self.name} (port 1) exited with code 1{LOG_END}log:\nsecond line")

    async def watch(self, lag):
        await watch_progress(self.client, self._settings, lag)

    async def stop(self, grace_s=20.0):
        self.killed = grace_s == 0
        await self.client.close()


def attempt_in(folder):
    return Attempt(run_id="r", incarnation="local.0", folder=folder, recipe_file=folder / "recipe.yaml")


async def hung(request):
    """Its health is good, and no generation ever ends."""
    if request.path == "/inference/v1/generate":
        await asyncio.Event().wait()
    return web.json_response({"cores": [{"core": 0, "tokens": 512, "waiting": 0, "decoding": 1}], "dead": False})


@contextlib.asynccontextmanager
async def engines_of(recipe, tmp_path, monkeypatch, fail_starts=(), busy=lambda client: None):
    """Engines behind a stand-in server, not started, and the processes and changes of state so far."""
    made, states, failing = [], [], []
    monkeypatch.setattr(engines_module, "FIRST_DELAY_S", 0.0)

    def make(self, index):
        made.append(StandInProcess(index, server.url, recipe.engine, failing, tmp_path / "engine-0.log"))
        busy(made[-1].client)
        return made[-1]

    monkeypatch.setattr(Engines, "_make", make)
    async with asyncio.timeout(120), StandInServer(hung) as server:
        engines = Engines(
            recipe,
            placement=Placement.of(recipe, ONE_HOST),
            hosts=ONE_HOST,
            attempt=attempt_in(tmp_path),
            secret="s",
            record=lambda member: states.append(str(member.state)),
        )
        failing.extend(fail_starts)
        try:
            yield engines, made, states
        finally:
            await engines.stop()
            await made[0].client.close()


async def test_a_hung_engine_is_evicted_during_a_completion_and_started_again(recipe, tmp_path, monkeypatch):
    async with engines_of(recipe, tmp_path, monkeypatch) as (engines, made, states):
        await engines.start()
        [client] = engines.members.stale
        engines.members.serve(client, 0)
        with pytest.raises(EngineLost, match=r"engine-0: engine-0 produced no token for [\d.]+ s with requests"):
            await client.generate([1], sampling=SamplingSpec(max_tokens=4))
        await engines.members.until(lambda: bool(engines.members.stale))
        with pytest.raises(EngineLost):
            await client.generate([1], sampling=SamplingSpec(max_tokens=4))
        [member] = engines.members.members
        assert len(made) == 2 and made[0].killed and member.client is made[1].client and member.restarts == 1
        assert states == ["stale", "serving", "draining", "lost", "starting", "stale"]
        assert member.lost_tokens == 512


def no_start(process):
    process._fail_starts.extend([True] * 5)


def no_end(process):
    async def stuck(grace_s=20.0):
        raise RuntimeError("engine-0 (process 7) is still running 30 s after SIGKILL")

    process.stop = stuck


def no_supervisor(process):
    process.server = None


@pytest.mark.parametrize(
    "broken, starts, error, said",
    [
        (no_start, None, EngineDied, r"0 engines .*\(engine-0: engine-0 \(port 1\) exited with code 1\)$"),
        (no_end, 1, EngineDied, r"0 engines .*\(engine-0: engine-0 \(process 7\) is still running"),
        (None, 3, EngineDied, r"0 engines .*\(engine-0: engine-0 produced no token"),  # it hangs after each start
        (no_supervisor, None, AttributeError, None),
    ],
)
async def test_an_engine_that_cannot_serve_again_is_given_up_and_ends_the_run(
    recipe, tmp_path, monkeypatch, broken, starts, error, said
):
    """However long it takes to find out that it hangs: the time until then is no sign of health."""
    monkeypatch.setattr(engines_module, "HEALTHY_S", 0.1)
    async with engines_of(recipe, tmp_path, monkeypatch) as (engines, made, _):
        await engines.start()
        if broken:
            broken(made[0])
            engines.members.evict(made[0].client, "engine-0: garbage")
        with pytest.raises(error, match=said):
            await engines.watch()
        assert starts is None or len(made) == starts


@pytest.mark.parametrize("completed, starts", [(0, 2), (64, 3)])
async def test_an_engine_that_ends_with_its_first_requests_is_given_up_with_the_last_error_of_its_log(
    recipe, tmp_path, monkeypatch, completed, starts
):
    """Not where engines of the run have completed something: then it may be chance."""
    error = "RuntimeError: CUDA error: no kernel image is available"
    (tmp_path / "engine-0.log").write_text(f"(EngineCore pid=7) ERROR 11-25 [core.py:1] {error}\nINFO: down\n")

    def busy(client):
        client.ended_generations = 1
        client.received_tokens = completed

    barren = "; given up: no engine completed a request in its last 2 starts" if not completed else ""
    said = rf"0 engines .*\(engine-0: engine-0 produced no token.*; the last error in its log: {error}{barren}\)$"
    async with engines_of(recipe, tmp_path, monkeypatch, busy=busy) as (engines, made, _):
        await engines.start()
        with pytest.raises(EngineDied, match=said):
            await engines.watch()
        assert len(made) == starts


async def test_the_sockets_of_a_server_go_with_it(recipe, tmp_path, monkeypatch):
    """vLLM makes them in VLLM_RPC_BASE_PATH, and leaves them there."""
    program = "import os; e = os.environ; open(e['VLLM_RPC_BASE_PATH'] + '/a', 'w')"
    program += "; os.write(int(e['MSRL_READY_FD']), b'1'); input()"
    monkeypatch.setattr(local_server, "engine_command", lambda _: [sys.executable, "-c", program])
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    place = local_server.ServerPlace(host="127.0.0.1")
    server = local_server.LocalServer(recipe, place, name="e", secret="s", log_path=tmp_path / "log")
    async with asyncio.timeout(120):
        await server.start()
        assert [path.name for path in temporary.glob("*/*")] == ["a"]
        await server.stop()
    assert list(temporary.iterdir()) == []


async def test_a_first_start_that_fails_is_final(recipe, tmp_path, monkeypatch):
    async with engines_of(recipe, tmp_path, monkeypatch, fail_starts=[True]) as (engines, made, _):
        with pytest.raises(ExceptionGroup) as failure:
            await engines.start()
        assert isinstance(failure.value.exceptions[0], EngineDied) and len(made) == 1


def test_the_address_of_an_engine_is_bound_when_it_is_chosen(recipe, tmp_path):
    """No other process can bind it between the choice and the start of the server, even with SO_REUSEADDR."""
    import socket

    placement = Placement.of(recipe, ONE_HOST)
    engines = Engines(recipe, placement=placement, hosts=ONE_HOST, attempt=attempt_in(tmp_path), secret="s")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", engines._processes[0].server.port))
    engines._processes[0].server._socket.close()

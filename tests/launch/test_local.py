"""The launcher stops every process, whatever fails meanwhile, and ends the run when one hangs."""

import asyncio

import pytest
from aiohttp import web
from launch.stand_ins import environment, gone, pids_in, stand_in

from megatron_scalerl.controller.run_folder import RunFolder
from megatron_scalerl.distributed.rendezvous import private_folder
from megatron_scalerl.engine.client import EngineClient, SamplingSpec
from megatron_scalerl.engine.watchdog import EngineDied, watch_progress
from megatron_scalerl.launch import local
from megatron_scalerl.launch.local import LocalLauncher
from megatron_scalerl.processes.child_process import ChildProcess
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.process_sections import EngineSection
from megatron_scalerl.trainer.client import TrainerError


@pytest.fixture
def run():
    """Runs a coroutine on the event loop of the launcher."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def launcher(tmp_path, run):
    """A launcher that has not started anything, for one engine and one trainer rank."""
    recipe = Recipe(
        name="r",
        output_dir=str(tmp_path),
        steps=1,
        policy={"path": "p"},
        prompts={"path": "q"},
        weights={"transport": "gloo"},
    )
    folder = RunFolder(recipe)

    async def make(rendezvous):
        return LocalLauncher(recipe, folder.attempt, "secret" * 8, rendezvous)

    with private_folder() as rendezvous:
        launcher = run(make(rendezvous))
        yield launcher
        launcher._client.close()
        folder.close()


class StandInEngine:
    """An engine whose stop fails."""

    name = "engine-7"

    async def stop(self):
        raise RuntimeError("cannot be stopped")


@pytest.mark.parametrize("failure", [TrainerError("trainer rank 0: gone"), TimeoutError(), OSError("no socket")])
def test_a_failing_stop_of_the_trainer_leaves_no_child(launcher, run, tmp_path, monkeypatch, caplog, failure):
    async def scenario():
        async def stop():
            raise failure

        monkeypatch.setattr(launcher._client, "stop", stop)
        for name in ("trainer-0", "trainer-1"):
            child = await ChildProcess.start(name, stand_in(tmp_path / "pids"), environment(), tmp_path / name)
            monkeypatch.setattr(child, "stop", lambda child=child: ChildProcess.stop(child, 0.3))
            launcher._trainers.append(child)
        launcher._engines.append(StandInEngine())
        groups = set(pids_in(tmp_path / "pids", 2))
        await launcher.stop(graceful=True)
        return groups

    assert gone(run(scenario()), 2.0)
    lines = [record.getMessage() for record in caplog.records if record.name == local.__name__]
    assert len(lines) == 2
    assert "the run is finished, but its trainer did not stop gracefully" in lines[0] and "\n" not in lines[0]
    assert lines[1] == "engine-7 could not be stopped: cannot be stopped"


def test_a_trainer_that_never_answers_the_stop_command_does_not_block_the_end(launcher, run, monkeypatch, caplog):
    async def scenario():
        monkeypatch.setattr(local, "_TRAINER_STOP_S", 0.2)
        monkeypatch.setattr(launcher._client, "stop", asyncio.Event().wait)
        await asyncio.wait_for(launcher.stop(graceful=True), 20)

    run(scenario())
    assert "its trainer did not stop gracefully: no answer" in caplog.text


class StandInHungServer:
    """Answers health and progress requests, and never generates a token."""

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/msrl/progress", self.progress)
        app.router.add_post("/inference/v1/generate", self.generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def health(self, _):
        return web.Response()

    async def progress(self, _):
        core = {"core": 0, "tokens": 512, "waiting": 0, "decoding": 1}
        return web.json_response({"cores": [core], "dead": False})

    async def generate(self, _):
        await asyncio.Event().wait()


def test_a_hung_engine_ends_the_run_during_a_completion(launcher, run):
    settings = EngineSection(stall_timeout_s=0.5)

    class StandInHungEngine:
        name = "engine-0"

        def __init__(self, client):
            self._client = client

        async def watch(self):
            await watch_progress(self._client, settings)

    async def scenario():
        async with StandInHungServer() as server, EngineClient(url=server.url, secret="s") as client:
            launcher._watches = [asyncio.create_task(StandInHungEngine(client).watch())]
            await launcher.while_alive(client.generate([1], sampling=SamplingSpec(max_tokens=4)))

    with pytest.raises(EngineDied, match=r"engine-0 produced no token for 0\.5\d* s with requests in flight"):
        run(asyncio.wait_for(scenario(), 30))


def test_the_address_of_an_engine_is_bound_when_it_is_chosen(launcher):
    """No other process can bind it between the choice and the start of the server, even with SO_REUSEADDR."""
    import socket

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", launcher._engines[0].port))
    launcher._client.close()

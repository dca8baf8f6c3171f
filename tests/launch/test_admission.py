"""Who may be an agent of a run, and what follows from its messages: raw sockets against real `Agents`."""

import asyncio
import contextlib
import os
import random
import re
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from recipe_files import small_recipe

from megatron_scalerl.distributed import sockets
from megatron_scalerl.launch import agent as messages
from megatron_scalerl.launch import agents as agents_module
from megatron_scalerl.launch.agents import Agents
from megatron_scalerl.launch.hosts import Host, Hosts
from megatron_scalerl.launch.local_server import ServerEnded
from megatron_scalerl.launch.placement import Attempt, EnginePlace
from megatron_scalerl.processes.child_process import ChildProcess

SECRET = "the secret of this run"
URL = "https://127.0.0.2:1234"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(agents_module, "PROBE_INTERVAL_S", 0.05)


class StandInAgent:
    """An agent's socket that sends what a test specifies."""

    def __init__(self, registry, *, secret=SECRET, purpose=sockets.Purpose.ENGINES):
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        sockets.secure_client(self.socket, secret, purpose)
        self.socket.connect(registry.endpoint)

    async def hello(self, **changes):
        values = {"name": "engine-0", "run_id": "run", "incarnation": "1.0", "start": "s", "host": "b", "devices": 2}
        await self.say(messages.Hello(**values | changes))

    async def join(self, name="extra-7-0", **changes):
        await self.hello(**{"name": name, "start": ""} | changes)

    async def say(self, message):
        await self.socket.send(sockets.encode(message))

    async def answer(self):
        """The next message but pings."""
        while True:
            message = messages.decode_for_agent(await asyncio.wait_for(self.socket.recv_multipart(), 120))
            if not isinstance(message, sockets.Ping):
                return message

    async def refusal(self):
        answer = await self.answer()
        assert isinstance(answer, sockets.Refused), answer
        return answer.reason

    def close(self):
        self._context.destroy(linger=0)


@contextlib.asynccontextmanager
async def registry_of(*, address="127.0.0.1", folder=Path(os.devnull), recipe=None, **options):
    """A registry that is being served, and a function that makes agents of it."""
    hosts = Hosts(hosts=(), slots=None, address=address)
    attempt = Attempt(run_id="run", incarnation="1.0", folder=folder, recipe_file=folder / "recipe.yaml")
    registry = Agents(recipe or small_recipe(), hosts=hosts, attempt=attempt, secret=SECRET, **options)
    serving = asyncio.create_task(registry.serve())
    agents = []

    def agent(**changes):
        agents.append(StandInAgent(registry, **changes))
        return agents[-1]

    try:
        yield registry, agent
        assert not serving.done()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for each in agents:
            each.close()
        registry.close()


async def engine_0(registry, agent):
    """The server of an engine whose agent was accepted, and the agent."""
    link = registry.expect("engine-0", "b", "s")
    one = agent()
    await one.hello()
    assert await one.answer() == registry.welcome
    return link, one


async def ended(link):
    return await asyncio.wait_for(asyncio.shield(link.end_reason), 240)


async def test_an_agent_says_hello_and_up_and_how_its_server_ended():
    async with registry_of() as (registry, agent):
        link, one = await engine_0(registry, agent)
        assert link.hello.result().devices == 2
        await one.say(messages.Up(url=URL))
        assert await link.up == URL
        await one.say(messages.Exited(how="exited with code -9"))
        assert await ended(link) == "exited with code -9"


@pytest.mark.parametrize(
    "peer", [{"secret": "another secret"}, {"purpose": sockets.Purpose.TRAINER}], ids=["secret", "purpose"]
)
async def test_a_wrong_key_gets_no_answer(peer):
    """Neither the secret of another run, nor the key of the trainer's ranks."""

    async with registry_of() as (registry, agent):
        link = registry.expect("engine-0", "b", "s")
        stranger, one = agent(**peer), agent()
        await stranger.hello()
        await one.hello()
        assert await one.answer() == registry.welcome
        assert not await stranger.socket.poll(300) and link.hello.done()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"run_id": "other"}, "the process belongs to run other, .* run$"),
        ({"incarnation": "0.0"}, "the process belongs to incarnation 0.0, .* 1.0$"),
        ({"start": "earlier"}, "engine-0: the controller does not wait for this start"),
        ({"name": "engine-1"}, "engine-1: the controller does not wait for this start"),
        ({"name": "extra-7-0"}, "extra-7-0: an engine that joins has an empty MSRL_START, but this engine has s"),
        ({"name": "extra-7/../0"}, "the .* bytes received are no valid message"),
        ({"devices": 0}, "the .* bytes received are no valid message"),
        ({"host": "b\x1b[2J"}, "the .* bytes received are no valid message"),
    ],
)
async def test_a_foreign_agent_is_refused_with_a_reason(changes, reason):
    async with registry_of() as (registry, agent):
        link = registry.expect("engine-0", "b", "s")
        one = agent()
        await one.hello(**changes)
        assert re.fullmatch(f"(?s){reason}.*", await one.refusal())
        assert not link.hello.done() and registry.joining.empty()


async def test_two_agents_with_one_name():
    async with registry_of() as (registry, agent):
        link, _ = await engine_0(registry, agent)
        second, third, fourth = (agent() for _ in range(3))
        await second.hello()
        assert await second.refusal() == "engine-0: an agent of this name is connected already"
        await third.join()
        assert await third.answer() == registry.welcome
        await fourth.join()
        assert await fourth.refusal() == "extra-7-0: an agent of this name is connected already"
        third.close()
        await ended(registry.joining.get_nowait())
        fifth = agent()
        await fifth.join()
        assert await fifth.answer() == registry.welcome
        assert not link.end_reason.done()


def frames(draws):
    """Anything that a broken agent may send: noise, changed messages, several frames, deep nesting."""
    whole = [
        messages.Hello(name="engine-0", run_id="run", incarnation="1.0", start="s", host="b", devices=1),
        messages.Up(url=URL),
        messages.Exited(how="x" * 100),
        messages.Stop(grace_s=1.0),
    ]
    for number in range(60):
        data = bytearray(sockets.encode(draws.choice(whole)))
        for _ in range(draws.randint(1, 4)):
            data[draws.randrange(len(data))] = draws.randrange(256)
        yield [bytes(data[: draws.randint(0, len(data))] if number % 2 else data)]
        yield [draws.randbytes(draws.randint(0, 50)) for _ in range(draws.randint(1, 3))]
    yield [b"\x91" * 50_000]
    yield [msgspec.msgpack.encode({"type": "Up", "url": "https://127.0.0.2:1/steal"})]
    yield [msgspec.msgpack.encode({"type": "Up", "url": "http://127.0.0.2:1"})]
    yield [msgspec.msgpack.encode({"type": "Exited", "how": "x" * (messages.HOW_CHARACTERS + 1)})]


async def test_no_frame_ends_the_registry_and_one_that_is_invalid_ends_its_agent():
    async with registry_of() as (registry, agent):
        for number, noise in enumerate(frames(random.Random(7))):
            start = f"s{number}"
            link = registry.expect(f"engine-{number}", "b", start)
            one, stranger = agent(), agent()
            await one.hello(name=link.name, start=start)
            assert await one.answer() == registry.welcome
            for sender in (stranger, one):
                await sender.socket.send_multipart(noise)
                if sender is stranger:
                    assert isinstance(await stranger.answer(), sockets.Refused)
            # of what is left of a message some is valid, and says that the server is up or ended
            await asyncio.wait({link.end_reason, link.up}, return_when=asyncio.FIRST_COMPLETED)
            one.close()
            stranger.close()
        good = agent()
        registry.expect("engine-0", "b", "good")
        await good.hello(start="good")
        assert await good.answer() == registry.welcome


async def test_a_message_that_is_too_long_ends_the_connection():
    async with registry_of() as (registry, agent):
        link, one = await engine_0(registry, agent)
        await one.socket.send(bytes(messages.LONGEST + 1))
        assert "lost the connection" in await ended(link)


@pytest.mark.parametrize("say", [0, 1, 2])
async def test_the_loss_of_a_connection_is_noticed_in_every_state(say):
    async with registry_of() as (registry, agent):
        link = registry.expect("engine-0", "b", "s")
        one = agent()
        if say >= 1:
            await one.hello()
            await one.answer()
        if say >= 2:
            await one.say(messages.Up(url=URL))
            await link.up
        one.close()
        if say:
            assert await ended(link) == "lost the connection to the agent on its host"
        again = agent()
        await again.hello()  # before Hello it may come again; afterwards the start is over
        assert isinstance(await again.answer(), sockets.Refused if say else messages.Welcome)


async def test_engines_that_join_are_queued_and_a_full_queue_refuses(monkeypatch):
    monkeypatch.setattr(agents_module, "MAX_JOINING", 2)
    async with registry_of() as (registry, agent):
        agents = [agent() for _ in range(3)]
        answers = []
        for number, one in enumerate(agents):
            await one.join(f"extra-7-{number}", devices=number + 1)
            answers.append(await one.answer())
        assert answers[:2] == [registry.welcome, registry.welcome]
        assert answers[2] == sockets.Refused(reason="2 engines are joining already; start this engine again later")
        link = registry.joining.get_nowait()
        assert (link.name, link.host, link.start_id, link.hello.result().devices) == ("extra-7-0", "b", "", 1)


async def test_a_controller_that_takes_no_engine_says_why():
    async with registry_of(objection=lambda hello: f"{hello.name} is not welcome") as (_, agent):
        one = agent()
        await one.join()
        assert await one.refusal() == "extra-7-0 is not welcome"


async def test_an_agent_gets_its_engines_port_and_devices():
    async with registry_of(recipe=small_recipe(weights={"transport": "nccl"}, engine={"port": 8000})) as (
        made,
        agent,
    ):
        place = EnginePlace(host=Host(name="b"), positions=(2, 3))
        started, joined = agent(), agent()
        await started.hello(name="teacher-t.1", start=made.engine(1, "teacher-t.1", place, 2).start_id)
        welcome = await started.answer()
        assert (welcome.port, welcome.positions) == (8001, [2, 3])
        await joined.join(devices=2)
        welcome = await joined.answer()
        assert (welcome.port, welcome.positions) == (0, [0, 1])


async def test_an_address_of_another_host_is_refused():
    with pytest.raises(ValueError, match=r"--address: 198\.51\.100\.77 "):
        async with registry_of(address="198.51.100.77"):
            raise AssertionError


async def test_an_agent_is_stopped_or_given_up():
    async with registry_of() as (registry, agent):
        link, one = await engine_0(registry, agent)
        await link.send(messages.Stop(grace_s=3.0))
        assert await one.answer() == messages.Stop(grace_s=3.0)
        await link.forget()
        assert await one.refusal() == "the controller has given up this start of the engine"
        assert await ended(link) == "was given up by the controller"
        late = agent()
        never = registry.expect("engine-1", "b", "late")
        await never.forget()
        await late.hello(name="engine-1", start="late")
        assert "does not wait for this start" in await late.refusal()


def command(script, tmp_path):
    """A launch of a stand-in command that starts no agent."""
    return lambda: ChildProcess.start("engine-0", ["sh", "-c", script], os.environ, tmp_path / "log")


@pytest.mark.parametrize(
    "script, within_s, said",
    [
        ("echo no route to host; exit 255", 240.0, r"lost the command that started its agent, .* code 255"),
        ("echo no route to host; sleep 100", 0.5, r"sent no message through its agent within 0\.5 s"),
    ],
    ids=["ends", "hangs"],
)
async def test_a_command_whose_agent_does_not_connect_is_reported_with_its_output(
    tmp_path, monkeypatch, script, within_s, said
):
    monkeypatch.setattr("megatron_scalerl.launch.agents.HELLO_S", within_s)
    async with registry_of(folder=tmp_path) as (registry, _):
        server = registry.expect("engine-0", "b", "s", command(script, tmp_path))
        with pytest.raises(ServerEnded, match=said):
            await server.start()
        assert server.location == "host b" and not server.reached
        if script.endswith("255"):
            assert "no route to host" in server.log_path.read_text()
        await server.stop()


async def test_an_agent_that_does_not_stop_may_hold_its_devices(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.launch.agents.ANSWER_S", 0.2)
    async with registry_of() as (registry, agent):
        one = agent()
        await one.join()
        server = await registry.joining.get()
        await one.say(messages.Up(url=URL))
        assert await server.start() == URL
        monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 100)  # after the sockets were made
        with pytest.raises(RuntimeError, match=r"its agent is connected and did not end the server within 0\.3 s"):
            await server.stop(0.0)
        assert await one.answer() == registry.welcome and await one.answer() == messages.Stop(grace_s=0.0)
        await server.stop()

"""The server of agents and its sessions, with a policy that a test answers for."""

import asyncio
import contextlib
import json

import aiohttp
import numpy as np
import pytest
from scripted_episodes import arrays
from waiting import until

from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.rollouts.agents import BODY_BYTES, AgentServer, LimitReached
from megatron_scalerl.rollouts.trace import Part

SETTINGS = EnvironmentSection(name="m:C", max_turns=4, timeout_s=0.3)
ASK = {"messages": [{"role": "user", "content": "1"}]}


class Policy:
    """Renders each conversation as one token, and says 9 once `go` is set."""

    def __init__(self, error=None, *, go=False):
        self.go = asyncio.Event()
        if go:
            self.go.set()
        self.asked = []
        self.error = error

    async def render(self, messages, turns, *, tools):
        return np.array([7]), True

    async def ask(self, context, **options):
        self.asked.append((context, options))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return Part(context, 0), PastTurn(token_ids=(4, 2), answer_start=0), arrays("9<eos>", 0)


@contextlib.asynccontextmanager
async def serving(policy):
    """(server, client, session)."""
    async with (
        AgentServer() as server,
        aiohttp.ClientSession() as client,
        server.session(SETTINGS, 20, policy.ask, policy) as session,
    ):
        yield server, client, session


async def status(client, agent, **request):
    """The status of an answer."""
    headers = {"Authorization": f"Bearer {agent.api_key}"}
    url = f"{agent.base_url}/chat/completions"
    async with client.post(url, headers=headers, **request or {"json": ASK}) as response:
        await response.read()
        return response.status


async def test_a_key_is_of_its_episode_alone_and_ends_with_it():
    policy = Policy(go=True)
    async with serving(policy) as (server, client, session):
        agent = session.begin()
        async with server.session(SETTINGS, 20, policy.ask, policy) as other:
            last = other.begin()
            assert last.api_key != agent.api_key and await status(client, last) == 200
        assert await status(client, last) == 401
        assert await status(client, agent) == 200
        async with client.get(f"{agent.base_url}/models") as response:
            assert response.status == 401


async def test_a_body_without_end_is_refused_before_it_is_read_whole():
    policy = Policy()
    sent = []

    async def endless():
        for _ in range(100 * 2**20 // 2**16):
            sent.append(2**16)
            yield b" " * 2**16

    async with serving(policy) as (_, client, session):
        with contextlib.suppress(aiohttp.ClientError):
            assert await status(client, session.begin(), data=endless()) == 413
        assert BODY_BYTES <= sum(sent) < 4 * BODY_BYTES and not policy.asked


async def test_requests_in_progress_end_with_the_session():
    policy = Policy()
    async with serving(policy) as (_, client, session):
        call = asyncio.create_task(status(client, session.begin()))
        await until(lambda: policy.asked)
    with pytest.raises(aiohttp.ClientError):
        await call


async def test_an_agent_that_hangs_up_and_asks_again_gets_the_same_answer():
    policy = Policy()
    async with serving(policy) as (_, client, session):
        agent = session.begin()
        call = asyncio.create_task(status(client, agent))
        await until(lambda: policy.asked)
        call.cancel()
        await until(lambda: not session._in_flight)
        again = [asyncio.create_task(status(client, agent)) for _ in range(2)]
        await until(lambda: len(policy.asked) == 2)
        policy.go.set()
        assert await asyncio.gather(*again) == [200, 200]
        assert len(policy.asked) == 2


@pytest.mark.parametrize("kind", [LimitReached, RuntimeError])
async def test_an_error_of_the_policy_ends_the_episode(kind):
    policy = Policy(kind("x"), go=True)
    async with serving(policy) as (_, client, session):
        agent = session.begin()
        assert [await status(client, agent) for _ in range(2)] == [410, 410]
        assert isinstance(session.over.exception(), kind) and len(policy.asked) == 1


async def test_an_agent_is_silent_while_no_request_is_in_flight():
    policy = Policy()
    async with serving(policy) as (_, client, session):
        agent = session.begin()
        silent = asyncio.create_task(session.silent())
        call = asyncio.create_task(status(client, agent))
        await until(lambda: policy.asked)
        ended, _ = await asyncio.wait([silent], timeout=2 * SETTINGS.timeout_s)
        assert not ended
        policy.go.set()
        assert await call == 200
        await asyncio.wait_for(silent, 30)


async def test_the_answer_to_a_streaming_client_is_one_chunk():
    async with serving(Policy(go=True)) as (_, client, session):
        agent = session.begin()
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        url = f"{agent.base_url}/chat/completions"
        async with client.post(url, json=ASK | {"stream": True}, headers=headers) as response:
            chunk, end, _ = (await response.text()).split("\n\n")
        assert response.content_type == "text/event-stream" and end == "data: [DONE]"
        [choice] = json.loads(chunk.removeprefix("data: "))["choices"]
        assert choice["delta"]["role"] == "assistant" and choice["finish_reason"] == "stop"

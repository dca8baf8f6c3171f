"""Sessions of agents with a policy that a test answers for."""

import asyncio
import contextlib

import aiohttp
import numpy as np
from scripted_episodes import arrays

from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.rollouts.agents import AgentServer
from megatron_scalerl.rollouts.decoder import TurnSettings
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
        self.problem = None
        self.said = ()
        self.decoded = arrays("9<eos>", 0)
        self.rendered = []

    async def render(self, messages, turns, talk):
        if self.problem is not None:
            raise self.problem
        self.rendered.append((list(map(list, messages)), turns))
        return np.array([7]), True

    async def ask(self, context, **options):
        self.asked.append((context, options))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return Part(context, 0), PastTurn(token_ids=(*self.said, 4, 2), answer_start=0), self.decoded


TALK = TurnSettings(prompts="{}", end_ids=(2,), thinking="keep")


def session_of(server, policy):
    return server.session(SETTINGS, policy.ask, policy, TALK, vocabulary=20, tokens=20)


@contextlib.asynccontextmanager
async def serving(policy):
    """(server, client, session)."""
    async with AgentServer() as server, aiohttp.ClientSession() as client, session_of(server, policy) as session:
        yield server, client, session


async def answer(client, agent, path="/v1/chat/completions", **body):
    """(status, JSON) of an answer."""
    headers = {"Authorization": f"Bearer {agent.api_key}"}
    async with client.post(agent.base_url.removesuffix("/v1") + path, json=body, headers=headers) as response:
        return response.status, await response.json()

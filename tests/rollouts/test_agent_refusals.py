"""What a user of OpenAI's client reads where the route of agents refuses a request."""

import contextlib

import openai
import pytest
from agent_sessions import ASK, Policy, answer, serving

from megatron_scalerl.rollouts.agents import LimitReached

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
SETTINGS = {
    "n": 2,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
    "verbosity": "low",
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "9"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": "none",
}
BODIES = {
    "chat_template_kwargs": {},
    "include_reasoning": True,
    "stop_token_ids": [5],
    "guided_json": {},
    "best_of": 2,
}
VALUES = {
    "max_tokens": 0,
    "max_completion_tokens": -1,
    "stop": [""],
    "tools": ["f"],
    "messages": [{"role": "user", "content": [IMAGE]}],
}
IDS = [[], [1, 2**40], [1, -1], [20]]
MESSAGES = [[], [*ASK["messages"], {"role": "assistant", "content": "9"}], [{"role": "function", "content": "9"}]]
REQUESTS = len(SETTINGS) + len(BODIES) + len(VALUES) + len(MESSAGES) + len(IDS) + 3
NO_ROUTES = {
    "completions": {"prompt": "1"},
    "responses": {"input": "1"},
    "embeddings": {"input": "1"},
    "moderations": {"input": "1"},
}


def client_of(agent, **options):
    return openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0, timeout=None, **options)


async def refusal(call, kind):
    """What the user reads."""
    with pytest.raises(kind) as raised:
        await call
    assert raised.value.type == "invalid_request_error" and raised.value.code == str(raised.value.status_code)
    return str(raised.value)


@contextlib.asynccontextmanager
async def route():
    """(client, session, policy, client of another kind, what its agent has)."""
    policy = Policy(go=True)
    async with serving(policy) as (_, plain, session):
        session._settings = session._settings.model_copy(update={"max_turns": REQUESTS})
        agent = session.begin()
        async with client_of(agent) as client:
            yield client, session, policy, plain, agent


async def test_a_request_that_is_refused_names_its_setting_and_what_to_do_and_counts():
    async with route() as (client, session, policy, plain, agent):
        chat = client.chat.completions.create
        for name, value in SETTINGS.items():
            text = await refusal(chat(model="policy", **ASK, **{name: value}), openai.BadRequestError)
            assert text.startswith(f"Error code: 400 - {name}: leave it out"), text
        for name, value in BODIES.items():
            text = await refusal(chat(model="policy", **ASK, extra_body={name: value}), openai.BadRequestError)
            assert text.startswith(f"Error code: 400 - {name}: leave it out"), text
        for name, value in VALUES.items():
            text = await refusal(chat(model="policy", **ASK | {name: value}), openai.BadRequestError)
            assert name in text and "docs/environments.md" in text, text
        for messages in MESSAGES:
            text = await refusal(chat(model="policy", messages=messages), openai.BadRequestError)
            assert "messages" in text and "docs/environments.md" in text, text
        for ids in IDS:
            code, body = await answer(plain, agent, "/inference/v1/generate", token_ids=ids)
            assert code == 400 and "token_ids" in body["error"]["message"], body
        deep = b'{"messages": ' + b"[" * 50_000
        async with plain.post(
            f"{client.base_url}chat/completions", data=deep, headers=client.auth_headers
        ) as response:
            assert response.status == 400
        policy.problem = ValueError("prompts.chat_template: it has no tools")
        text = await refusal(chat(model="policy", **ASK), openai.BadRequestError)
        assert "prompts.chat_template: it has no tools" in text
        policy.problem = None
        assert not policy.asked
        assert (await chat(model="policy", **ASK, temperature=0.1, seed=1, stop=None)).choices
        await refusal(chat(model="policy", **ASK), openai.APIStatusError)
        assert isinstance(session.over.exception(), LimitReached) and len(policy.asked) == 1


async def test_what_is_no_route_names_the_routes():
    async with route() as (client, *_):
        calls = [getattr(client, name).create(model="policy", **options) for name, options in NO_ROUTES.items()]
        for call in (*calls, client.models.retrieve("policy")):
            text = await refusal(call, openai.NotFoundError)
            assert "POST /v1/chat/completions" in text and "POST /inference/v1/generate" in text, text


async def test_a_key_a_body_and_an_end_say_what_they_are():
    async with route() as (client, _, policy, *_):
        chat = client.chat.completions.create
        long = [{"role": "user", "content": "1" * 2**22}]
        assert "4194304" in await refusal(chat(model="policy", messages=long), openai.APIStatusError)
        unknown = client.with_options(api_key="x").chat.completions.create(model="policy", **ASK)
        assert "agent.api_key" in await refusal(unknown, openai.AuthenticationError)
        policy.error = LimitReached("x")
        for _ in range(2):
            text = await refusal(chat(model="policy", **ASK), openai.APIStatusError)
            assert "410 - the episode has ended by a limit, such as environment.max_turns" in text

"""The server of agents and its sessions, with a policy that a test answers for."""

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import numpy as np
import pytest
from agent_sessions import ASK, SETTINGS, Policy, answer, serving, session_of
from chat_templates import KIMI_TURNS, LLAMA3_TURNS, QWEN3_TURNS
from turn_policies import KIMI, LLAMA, TOOL, ids_of, turns_tokenizer
from waiting import passes, until

from megatron_scalerl.environments.response import ROUTE_HEADER
from megatron_scalerl.rollouts.agents import BODY_BYTES, AgentServer, AnswerCut, LimitReached
from megatron_scalerl.rollouts.tool_calls import tool_parser


async def status(client, agent, **request):
    """The status of an answer."""
    headers = {"Authorization": f"Bearer {agent.api_key}"}
    url = f"{agent.base_url}/chat/completions"
    async with client.post(url, headers=headers, **request or {"json": ASK}) as response:
        await response.read()
        return response.status


@contextlib.asynccontextmanager
async def begun(policy):
    """A client, a session and the agent that the session has begun."""
    async with serving(policy) as (_, client, session):
        yield client, session, session.begin()


async def raw_connection(agent):
    return await asyncio.open_connection("127.0.0.1", int(agent.base_url.split(":")[2].removesuffix("/v1")))


def head_of(key):
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        "Content-Length: 4000000\r\n\r\n"
    ).encode()


async def test_a_key_is_of_its_episode_alone_and_ends_with_it():
    policy = Policy(go=True)
    async with serving(policy) as (server, client, session):
        agent = session.begin()
        async with session_of(server, policy) as other:
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
    async with AgentServer() as server, aiohttp.ClientSession() as client:
        async with session_of(server, policy) as session:
            call = asyncio.create_task(status(client, session.begin()))
            await until(lambda: policy.asked)
            [entry] = session._record
        assert entry.answer.cancelled() and not session._handlers
        with pytest.raises(aiohttp.ClientError):
            await call


@pytest.mark.parametrize("kind", [LimitReached, RuntimeError, KeyError])
async def test_an_error_of_the_policy_ends_the_episode(kind):
    policy = Policy(kind("x"), go=True)
    async with begun(policy) as (client, session, agent):
        assert [await status(client, agent) for _ in range(2)] == [410, 410]
        assert isinstance(session.over.exception(), kind) and len(policy.asked) == 1


async def test_an_agent_is_silent_while_no_request_is_in_flight():
    policy = Policy()
    async with begun(policy) as (client, session, agent):
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


def asking(text, **settings):
    return {"json": {"messages": [{"role": "user", "content": text}], **settings}}


async def test_parallel_branches_may_ask_in_another_order_when_they_are_tried_again():
    policy = Policy(go=True)
    async with begun(policy) as (client, session, agent):
        for text in ("a", "b", "b2"):
            assert await status(client, agent, **asking(text)) == 200
        session.end()
        agent = session.begin()
        for text in ("a", "b", "a2"):
            assert await status(client, agent, **asking(text)) == 200
        assert session.unasked
        assert await status(client, agent, **asking("b2")) == 200
        assert not session.unasked and len(policy.asked) == 4


async def test_what_is_left_of_a_try_asks_nothing_in_the_next_one():
    policy = Policy()
    async with begun(policy) as (client, session, agent):
        call = asyncio.create_task(status(client, agent))
        await until(lambda: policy.asked)
        session.end()
        with pytest.raises(aiohttp.ClientError):
            await call
        assert await status(client, agent) == 401
        policy.go.set()
        last = session.begin()
        assert await status(client, agent) == 401
        assert await status(client, last) == 200
        assert len(policy.asked) == 1 and not session.unasked


async def test_a_request_that_is_repeated_before_its_hang_up_is_seen_is_sampled_once():
    policy = Policy()
    async with begun(policy) as (client, session, agent):
        first = asyncio.create_task(status(client, agent))
        await until(lambda: policy.asked)
        again = asyncio.create_task(status(client, agent))
        await until(lambda: len(policy.asked) == 2)
        first.cancel()
        await until(lambda: len(session._handlers) == 1)
        policy.go.set()
        assert await again == 200
        assert len(session._record) == 1 and not session.over.done()
        # an equal request is a second sample
        assert await status(client, agent) == 200 and len(policy.asked) == 3


async def test_settings_that_clients_of_ids_send_are_taken():
    """Those of renderers.client 0.2, which the train client of verifiers calls."""
    policy = Policy(go=True)
    async with serving(policy) as (_, client, session):
        sampling = {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False, "temperature": 1.0}
        body = {"model": "policy", "token_ids": [1, 5], "sampling_params": sampling | {"max_tokens": 7}}
        code, body = await answer(
            client, session.begin(), "/inference/v1/generate", **body, cache_salt="k", priority=0
        )
        assert code == 200 and body["choices"][0]["token_ids"] == [4, 2]
        [(context, options)] = policy.asked
        assert context == [1, 5] and options["max_tokens"] == 7


async def test_a_request_beyond_what_the_context_may_hold_is_not_rendered():
    policy = Policy(go=True)
    async with begun(policy) as (client, session, agent):
        assert await status(client, agent, **asking("<|im_end|>" * 5000)) == 200
        assert await status(client, agent, **asking("x", tools=[{"a": "<|im_end|>" * 7000}])) == 410
        assert len(policy.asked) == 1 and isinstance(session.over.exception(), LimitReached)


async def test_one_request_of_a_session_is_rendered_at_a_time():
    policy = Policy(go=True)
    rendering = []
    most = []

    async def render(messages, turns, talk):
        rendering.append(1)
        most.append(len(rendering))
        await passes()
        rendering.pop()
        return np.array([7]), True

    policy.render = render
    async with begun(policy) as (client, _, agent):
        assert await asyncio.gather(*(status(client, agent, **asking(text)) for text in "abc")) == [200] * 3
    assert most == [1, 1, 1]


async def test_a_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.agents.BODY_S", 0.3)
    policy = Policy(go=True)
    async with serving(policy) as (_, _, session):
        agent = session.begin()
        reader, writer = await raw_connection(agent)
        writer.write(head_of(agent.api_key))
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        reader, writer = await raw_connection(agent)
        writer.write(head_of(agent.api_key)[:-2])
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_slow_body_does_not_hold_the_end_of_the_run():
    async with serving(Policy()) as (server, _, session):
        agent = session.begin()
        _, writer = await raw_connection(agent)
        writer.write(head_of(agent.api_key))
        await until(lambda: server._runner.server.requests_count)
        await asyncio.wait_for(server._runner.cleanup(), 30)
        writer.close()


async def test_connections_take_at_most_half_of_the_files_of_the_process(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.agents.resource.getrlimit", lambda _: (20, 20))
    async with serving(Policy(go=True)) as (server, client, session):
        agent = session.begin()
        assert await status(client, agent) == 200
        pairs = [await raw_connection(agent) for _ in range(30)]
        await until(lambda: len(server._runner.server.connections) >= 10)
        reader, _ = pairs[-1]
        assert await asyncio.wait_for(reader.read(), 30) == b""
        assert len(server._runner.server.connections) == 10
        assert await status(client, agent) == 200
        for _, writer in pairs:
            writer.close()


async def test_the_last_of_equal_answers_is_continued():
    policy = Policy(go=True)
    async with serving(policy) as (_, client, session):
        session._settings = SETTINGS.model_copy(update={"max_turns": 10})
        agent = session.begin()
        for thought in ((5,), (6,)):
            policy.said = thought
            assert await status(client, agent) == 200
        talk = [*ASK["messages"], {"role": "assistant", "content": ""}, {"role": "user", "content": "2"}]
        assert await status(client, agent, json={"messages": talk}) == 200
        messages, turns = policy.rendered[-1]
        assert [[message["content"] for message in new] for new in messages] == [["1"], ["2"]]
        assert [turn.token_ids for turn in turns] == [(6, 4, 2)]


async def test_a_request_with_its_key_in_the_body_is_answered_from_the_record():
    policy = Policy(go=True)
    async with serving(policy) as (_, client, session):
        for _ in range(2):
            agent = session.begin()
            async with client.post(
                f"{agent.base_url}/chat/completions",
                json=ASK | {"cache_salt": agent.api_key},
                headers={ROUTE_HEADER: agent.route_key},
            ) as response:
                assert response.status == 200
            session.end()
        assert len(policy.asked) == 1 and not session.unasked


@pytest.mark.parametrize(
    "template, tokens, text, name",
    [
        (QWEN3_TURNS, (), '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "call_0_0"),
        (
            KIMI_TURNS,
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            "functions.add:3",
        ),
        (LLAMA3_TURNS, LLAMA, '{"name": "add", "parameters": {"a": 1}}', "call_0_0"),
    ],
)
async def test_a_call_stands_in_the_message_once_under_the_id_of_its_format(template, tokens, text, name):
    tokenizer = turns_tokenizer(template, more=tokens)
    before, calls = tool_parser(tokenizer, [TOOL], [])(ids_of(tokenizer, text))
    policy = Policy(go=True)
    policy.decoded = dataclasses.replace(policy.decoded, text=text, tool_calls=calls, before_calls=before)
    async with begun(policy) as (client, _, agent):
        _, body = await answer(client, agent, **ASK)
        message = body["choices"][0]["message"]
        assert message["content"] == ""
        [call] = message["tool_calls"]
        assert (call["id"], call["function"]) == (name, {"name": "add", "arguments": '{"a":1}'})
        # the client sends the message back, and the conversation goes on; a template reads the id of other calls
        talk = [*ASK["messages"], message, {"role": "tool", "tool_call_id": name, "content": "2"}]
        assert (await answer(client, agent, messages=talk))[0] == 200
        assert len(policy.rendered[-1][1]) == 1
        talk[1] = message | {"content": "other"}
        assert (await answer(client, agent, messages=talk))[0] == 200
        [[_, written, _]], turns = policy.rendered[-1]
        assert written["tool_calls"][0]["id"] == name and not turns


async def test_no_body_is_read_without_a_known_key():
    async with serving(Policy()) as (_, _, session):
        agent = session.begin()
        session.end()
        for key in ("x", agent.api_key):  # of no try, and of one that has ended; no byte of the body
            reader, writer = await raw_connection(agent)
            writer.write(head_of(key))
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()


async def test_connections_without_a_known_key_are_few_and_harm_no_agent(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.rollouts.agents.MOST_STRANGERS", 5)
    monkeypatch.setattr("megatron_scalerl.rollouts.agents.STRANGER_S", 0.0)
    policy = Policy()
    async with serving(policy) as (server, client, session):
        agent = session.begin()
        call = asyncio.create_task(status(client, agent))
        await until(lambda: policy.asked)
        strangers = [await raw_connection(agent) for _ in range(30)]
        for _, writer in strangers[20:]:
            writer.write(head_of("x"))
        for reader, _ in strangers[:20]:
            assert await asyncio.wait_for(reader.read(), 30) == b""
        await until(lambda: len(server._runner.server.connections) <= 6)
        policy.go.set()
        assert await call == 200
        for _, writer in strangers:
            writer.close()


async def test_an_identical_request_after_a_time_out_gets_the_answer_in_progress():
    """The second of its kind, by a client with a time limit that tries again."""
    policy = Policy(go=True)
    async with begun(policy) as (client, session, agent):
        assert await status(client, agent) == 200
        policy.go.clear()
        for _ in range(3):
            call = asyncio.create_task(status(client, agent))
            await until(lambda: len(policy.asked) == 2 and session._handlers)
            call.cancel()
            await until(lambda: not session._handlers)
        policy.go.set()
        assert await status(client, agent) == 200
        assert len(policy.asked) == 2 and len(session._record) == 2


async def test_a_text_that_ends_a_turn_is_no_part_of_the_answer_and_the_talk_goes_on():
    policy = Policy(go=True)
    policy.decoded = dataclasses.replace(policy.decoded, text="Add. Observation: 9")
    async with begun(policy) as (client, _, agent):
        _, body = await answer(client, agent, **ASK, stop=["Calling tools:", "Observation:"])
        message = body["choices"][0]["message"]
        assert message["content"] == "Add. " and policy.asked[0][1]["stop"] == ["Calling tools:", "Observation:"]
        _, body = await answer(client, agent, messages=[*ASK["messages"], message, *ASK["messages"]], stop="never")
        assert body["choices"][0]["message"]["content"] == "Add. Observation: 9"
        assert policy.asked[1][1]["stop"] == ["never"] and len(policy.rendered[-1][1]) == 1
        await answer(client, agent, **ASK, stop=None)
        assert policy.asked[2][1]["stop"] == ()


async def test_a_limit_of_the_requests_that_ends_nearly_all_episodes_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr("megatron_scalerl.rollouts.agents.ENDS", 4)
    async with AgentServer() as server, aiohttp.ClientSession() as client:
        for error in (None, *[AnswerCut("x")] * 4, None):
            assert not caplog.records
            async with session_of(server, Policy(error, go=True)) as session:
                assert await status(client, session.begin()) == (410 if error else 200)
            if len(server._cut) == 0:
                break
        [record] = caplog.records
        assert "max_tokens of the agent's requests has truncated 4 of the latest 4 episodes" in record.getMessage()

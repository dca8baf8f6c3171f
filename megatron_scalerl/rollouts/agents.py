"""The route by which agents ask the policy: a server on loopback, and a session for each episode.

    run(row, agent) --POST /v1/chat/completions, /inference/v1/generate--> Session --context--> ask() --> engine

The life of a session:

    open       its key is known to the server from now on, and to nobody but its agent
    request    what arrives as ids is the context; messages are rendered after the longest conversation that they
               continue, whose ids are kept. `rollouts.trace` says which part the context continues
    answer     ids, or a message with calls of tools
    close      requests in progress are cancelled; later ones are unknown

Each request is on record with its answer. Where `run` is tried again after a failure, requests that equal recorded
ones get their answers, each once, so that nothing is sampled twice. `over` has the error with which the episode ends:
a limit, or the engine's.

An agent is not trusted: bodies have at most BODY_BYTES, an episode has environment.max_turns requests, ids are those
of the vocabulary, and no setting of a request changes how the policy is sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.environments.response import Agent, Message, ToolCall
from megatron_scalerl.processes.child_process import cancelled, time_limit
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.decoder import Decoded
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.trace import Part

HOST = "127.0.0.1"
MODEL = "policy"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
BODY_BYTES = 2**23
"""Most bytes of a request: a million tokens."""
CALL = "<tool_call>"
"""Text with which calls begin in all formats of `rollouts.tool_calls`."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "content_parts": ([],),
    "features": (),
}
"""Settings that a request may have with these values alone, or null."""


class LimitReached(Exception):
    """A limit ended the episode."""


@record
class Asked:
    """A turn of the policy. Produced by `rollouts.episodes`."""

    part: Part
    turn: PastTurn
    decoded: Decoded


class Ask(Protocol):
    """Samples a turn after a context [N]. Raises LimitReached, and as `EpisodeSampler.complete`."""

    def __call__(
        self, context: list[int], *, number: int, most: int | None = None, tools: str | None = None
    ) -> Awaitable[Asked]:
        """number: of the turn in the episode, from 0. most: tokens. tools: as JSON."""


@record
class Said:
    """A conversation after a turn of the policy."""

    tools: str
    flat: list[Message]
    """All messages, the policy's too."""
    messages: tuple[list[Message], ...]
    """[turns] those before each turn."""
    turns: tuple[PastTurn, ...]
    part: Part
    size: int
    """Tokens of the part up to here."""


class _Text(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None


_Budget = Annotated[int, msgspec.Meta(ge=1)]


class _Sampling(msgspec.Struct):
    max_tokens: _Budget | None = None


class _Salted(msgspec.Struct):
    cache_salt: str = ""


class _Generate(msgspec.Struct):
    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    sampling_params: _Sampling


class _Chat(msgspec.Struct):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    max_tokens: _Budget | None = None
    max_completion_tokens: _Budget | None = None
    stream: bool | None = None


class Session:
    """One episode of an agent; `environments.pool.Session` describes what its pool needs."""

    def __init__(
        self, agent: Agent, ask: Ask, decoders: DecoderPool, *, turns: int, silent_s: float, vocabulary: int
    ):
        """turns: requests at most. silent_s: time without a request after which the agent hangs. vocabulary: ids."""
        self.changed = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error that ended the episode."""
        self._agent = agent
        self._ask = ask
        self._decoders = decoders
        self._most_turns = turns
        self._silent_s = silent_s
        self._vocabulary = vocabulary
        self._record: list[tuple[bytes, asyncio.Task[web.Response]]] = []
        """Digests of the requests, with what answers them."""
        self._again: list[tuple[bytes, asyncio.Task[web.Response]]] = []
        """Those of earlier tries that were not yet asked in this one."""
        self._said: list[Said] = []
        self._in_flight = 0
        self._asked = asyncio.Event()
        """Set while a request is in flight."""
        self._quiet = asyncio.Event()
        """Set while none is."""
        self._quiet.set()

    def begin(self) -> Agent:
        """Begin a try of the run."""
        self.changed = False
        self._again = list(self._record)
        return self._agent

    async def silent(self) -> None:
        """Return once no request was in flight for the limit."""
        while True:
            await self._quiet.wait()
            try:
                async with time_limit(self._silent_s):
                    await self._asked.wait()
            except TimeoutError:
                return

    async def close(self) -> None:
        """Cancel the requests in progress."""
        await cancelled(*(answer for _, answer in self._record))
        if not self.over.cancel():
            self.over.exception()  # retrieved

    async def answer(self, path: str, data: bytes) -> web.Response:
        """The answer to a request, on record or new."""
        digest = hashlib.sha256(path.encode() + data).digest()
        with self._asking():
            if self.over.done() or self.changed:
                raise web.HTTPGone(text="the episode has ended")
            for number, (earlier, answer) in enumerate(self._again):
                if earlier == digest:
                    del self._again[number]
                    return await asyncio.shield(answer)
            if self._again:
                self.changed = True
                raise web.HTTPGone(text="an earlier try has asked something else")
            answer = asyncio.create_task(self._new(path, data, len(self._record)))
            self._record.append((digest, answer))
            return await asyncio.shield(answer)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self._in_flight += 1
        self._quiet.clear()
        self._asked.set()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._asked.clear()
                self._quiet.set()

    async def _new(self, path: str, data: bytes, number: int) -> web.Response:
        """The answer to a new request. number: in the episode, from 0."""
        try:
            if number >= self._most_turns:
                raise LimitReached
            body = msgspec.json.decode(data, type=dict[str, Any])
            answer = {GENERATE: self._generated, CHAT: self._chatted}[path]
            return await answer(body, number)
        except (ValueError, RecursionError) as problem:
            raise web.HTTPBadRequest(text=str(problem)) from None
        except Exception as end:
            if not self.over.done():
                self.over.set_exception(end)
            raise web.HTTPGone(text="the episode has ended") from None

    async def _generated(self, body: dict[str, Any], number: int) -> web.Response:
        """Ids after ids, in the form of vLLM."""
        request = msgspec.convert(body, _Generate)
        _check(body)
        _check(body["sampling_params"])
        if max(request.token_ids) >= self._vocabulary:
            raise ValueError(f"token_ids: {max(request.token_ids)} is no token; there are {self._vocabulary}")
        asked = await self._ask(request.token_ids, number=number, most=request.sampling_params.max_tokens, tools="[]")
        arrays = read(asked.decoded.data)
        values = zip(arrays.token_ids.tolist(), arrays.rollout_logprobs.tolist())
        logprobs = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in values]
        choice = {
            "index": 0,
            "token_ids": asked.turn.token_ids,
            "logprobs": {"content": logprobs},
            "finish_reason": "stop",
        }
        return _json({"request_id": f"turn-{number}", "choices": [choice]})

    async def _chatted(self, body: dict[str, Any], number: int) -> web.Response:
        """A message after messages."""
        request = msgspec.convert(body, _Chat)
        _check(body)
        messages = list(map(_plain, request.messages))
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages: the last one has to be of user, tool or system")
        tools = msgspec.json.encode(request.tools or []).decode()
        known = [said for said in self._said if said.tools == tools and messages[: len(said.flat)] == said.flat]
        said = max(known, key=lambda said: len(said.flat), default=None)
        before: tuple[list[Message], ...] = ()
        turns: tuple[PastTurn, ...] = ()
        new = messages
        context = []
        if said is not None:
            before = said.messages
            turns = said.turns
            new = messages[len(said.flat) :]
            context = said.part.context[: said.size]
        ids, whole = await self._decoders.render([*before, new], turns, tools=tools)
        if whole:
            context = []
        context += ids.tolist()
        budgets = (request.max_tokens, request.max_completion_tokens)
        most = min(filter(None, budgets), default=None)
        asked = await self._ask(context, number=number, most=most, tools=tools)
        calls = asked.decoded.tool_calls
        if request.tool_choice == "none":
            calls = ()
        message = _answer(asked.decoded.text or "", calls, number)
        end = Said(
            tools=tools,
            flat=[*messages, _plain(msgspec.convert(message, _Message))],
            messages=(*before, new),
            turns=(*turns, asked.turn),
            part=asked.part,
            size=len(context) + len(asked.turn.token_ids),
        )
        self._said.append(end)
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {
            "prompt_tokens": len(context),
            "completion_tokens": len(asked.turn.token_ids),
            "total_tokens": end.size,
        }
        answer = {"id": f"turn-{number}", "created": 0, "model": MODEL, "usage": usage}
        if request.stream:
            chunk = answer | {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            text = f"data: {msgspec.json.encode(chunk).decode()}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return _json(answer | {"object": "chat.completion", "choices": [choice | {"message": message}]})


def _check(body: dict[str, Any]) -> None:
    """Raise ValueError for a setting that would not be what it says."""
    for name, values in ALLOWED.items():
        value = body.get(name)
        if value is not None and value not in values:
            allowed = ", ".join([*map(str, values), "null"])
            raise ValueError(f"{name}: it can be {allowed} here, as the run decides how its policy is sampled")


def _plain(message: _Message) -> Message:
    """A message for the chat template, equal to another one if both say the same."""
    text = message.content or ""
    if not isinstance(text, str):
        text = "".join(part.text for part in text)
    if message.role == "assistant":
        # the policy's own text may come back without the space around it
        plain: Message = {"role": "assistant", "content": text.strip()}
        if message.tool_calls:
            plain["tool_calls"] = [{"type": "function", "function": _arguments(call)} for call in message.tool_calls]
        return plain
    plain = {"role": message.role.replace("developer", "system"), "content": text}
    names = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in names.items() if value is not None}


def _arguments(call: _Call) -> dict[str, Any]:
    """A call as templates read it: arguments are no text if they are JSON."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(msgspec.MsgspecError):
        arguments = msgspec.json.decode(arguments)
    return {"name": call.function.name, "arguments": arguments}


def _answer(text: str, calls: Sequence[ToolCall], number: int) -> dict[str, Any]:
    """The policy's message. A call that cannot be read stays in its text."""
    readable = [call for call in calls if not call.error]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if not readable:
        return message
    before, _, _ = text.partition(CALL)
    message["content"] = before + "".join(call.raw for call in calls if call.error)
    message["tool_calls"] = [
        {
            "index": index,
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
        }
        for index, call in enumerate(readable)
    ]
    return message


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class AgentServer:
    """The server of all sessions; `async with` starts and closes it."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        """By their keys."""

    async def __aenter__(self) -> AgentServer:
        application = web.Application(client_max_size=BODY_BYTES)
        application.router.add_get("/v1/models", self._models)
        for path in (GENERATE, CHAT):
            application.router.add_post(path, self._post)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[Session]:
        """A session in a block; `options` as for `Session`."""
        key = secrets.token_urlsafe(32)
        port = self._runner.addresses[0][1]
        agent = Agent(base_url=f"http://{HOST}:{port}/v1", api_key=key, model=MODEL)
        session = self._sessions[key] = Session(agent, **options)
        try:
            yield session
        finally:
            del self._sessions[key]
            await session.close()

    def _of(self, request: web.Request, salt: str = "") -> Session:
        """The session of a request, by its authorization or else its cache_salt."""
        session = self._sessions.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        session = session or self._sessions.get(salt)
        if session is None:
            raise web.HTTPUnauthorized(text="the key is of no episode in progress")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._of(request)
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _post(self, request: web.Request) -> web.Response:
        data = await request.read()
        session = self._of(request, msgspec.json.decode(data, type=_Salted).cache_salt)
        return await session.answer(request.path, data)

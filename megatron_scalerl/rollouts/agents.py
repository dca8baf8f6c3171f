"""The route by which agents ask the policy: a server on loopback, and a session for each episode.

    run(row, agent) --POST /v1/chat/completions, /inference/v1/generate--> Session --context--> ask() --> engine

The life of a session:

    begin      a try of `run` gets a key, which is known to the server and to nobody but its agent
    request    what arrives as ids is the context; messages are rendered after the longest conversation that they
               continue, whose ids are kept. `rollouts.trace` says which part the context continues
    answer     ids, or a message with calls of tools
    end        the try's key is unknown from now on, and its requests in progress are cancelled
    close      what is being sampled is cancelled

Each request is on record with its answer. Where `run` is tried again after a failure, requests that equal recorded
ones get their answers, each once, so that nothing is sampled twice; others are new, and whether anything on record
was left `unasked` is judged when the run has ended, as parallel branches ask in any order. `over` has the error with
which the episode ends: a limit, or the engine's.

An agent is not trusted: connections are bounded, and those without a known key are few; no body is read before the
key is known. The time and the bytes of a body are bounded, an episode has environment.max_turns requests, of which
one is rendered at a time, ids are those of the vocabulary, and no setting of a request changes how the policy is
sampled, but for texts at which it stops. Every refusal is the JSON that OpenAI's client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import resource
import secrets
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.environments.response import ROUTE_HEADER, Agent, Message
from megatron_scalerl.processes.child_process import cancelled, time_limit
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.decoder import Decoded, TurnSettings
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.trace import Part
from megatron_scalerl.types import CompletionLost

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MODEL = "policy"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
BODY_BYTES = 2**22
"""Most bytes of a request."""
BODY_S = 60.0
"""Time for a request to arrive, and for a connection without one (s)."""
TOKEN_BYTES = 16
"""Bytes of a body for each token that a context may have, beside OTHER_BYTES: an id takes 8 at most, words take 5.

A decoder takes 16 us for a byte of special tokens.
"""
OTHER_BYTES = 2**16
"""Bytes of a body beside its context."""
IGNORED = """
    model user metadata store service_tier safety_identifier prompt_cache_key stream_options priority cache_salt
    sampling_params temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty
"""
"""Settings that change nothing: the run decides how its policy is sampled."""
OF_IDS = "stop_token_ids logprobs skip_special_tokens return_token_ids routed_experts_prompt_start"
"""Settings of clients that send ids, who get ids with log-probs in any case."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "content_parts": ([],),
}
"""Settings that a request may have with these values alone. Of others it may have none, unless they are null."""


MOST_STRANGERS = 256
"""Connections that have shown no known key; above this number the oldest is closed, if it had STRANGER_S."""
STRANGER_S = 5.0
"""Time to show a key (s): many agents connect at once when episodes begin."""
ENDS = 64
"""Latest episodes of which it is counted how many were cut by `max_tokens`."""
UNKNOWN = "the key is of no episode in progress: send agent.api_key of this call of run"
GONE = "the episode has ended by a limit, such as environment.max_turns; its run is cancelled"
NO_ROUTE = f"there is no such route: ask POST {CHAT}, POST {GENERATE} or GET /v1/models"
REFUSED = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a request that is refused; JSON that is too deep is a RecursionError, and that a RuntimeError."""


class LimitReached(Exception):
    """A limit ended the episode."""


class AnswerCut(LimitReached):
    """The limit is `max_tokens` of the agent's request."""


Ask = Callable[..., Awaitable[tuple[Part, PastTurn, Decoded]]]
"""Samples a turn after a context [N], as `EpisodeSampler._ask`."""


@record
class Said:
    """A conversation after a turn of the policy."""

    messages: tuple[list[Message], ...] = ()
    """[turns] those before each turn."""
    turns: tuple[PastTurn, ...] = ()
    part: Part = Part(array("I"), 0)
    tokens: int = 0
    """Of the part, up to here."""


@record
class _Asked:
    """A request that can be sampled."""

    context: list[int]
    tools: str = "[]"
    """As JSON."""
    said: Said = Said()
    """The conversation, with the new messages."""
    digest: Any = None
    """Of tools and messages, to be updated."""


class _Text(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Text] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None


class _Salted(msgspec.Struct):
    cache_salt: str = ""


class _Body(msgspec.Struct):
    """A request on one of both paths, with sampling_params among its fields."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    messages: list[_Message] = []
    tools: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stop: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(max_length=16)] | None = None
    """Texts at which the answer ends."""


Reply = tuple[int, str, bytes]
"""(status, type, body) of an answer, which may be sent several times."""


@dataclass(eq=False)
class _Entry:
    """A request on record."""

    digest: bytes
    answer: asyncio.Task[Reply]
    reader: Any = None
    """The handler of the try in progress that has got the answer, or waits for it."""


class Session:
    """One episode of an agent; `environments.pool.Session` says what its pool needs."""

    def __init__(
        self,
        sessions: dict[str, Session],
        agent: Agent,
        settings: EnvironmentSection,
        ask: Ask,
        decoders: DecoderPool,
        talk: TurnSettings,
        *,
        vocabulary: int,
        tokens: int,
    ):
        """sessions: all, by their keys. agent: gets a key. vocabulary: ids of the policy. tokens: of a context, at
        most."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error that ended the episode."""
        self._agent = agent
        self._ask = ask
        self._decoders = decoders
        self._talk = talk
        self._most_bytes = tokens * TOKEN_BYTES + OTHER_BYTES
        self._rendering = asyncio.Lock()
        self._sessions = sessions
        self._settings = settings
        self._vocabulary = vocabulary
        self._requests = 0
        self._record: list[_Entry] = []
        self.unasked: set[_Entry] = set()
        """What earlier tries have asked, and this one has not."""
        self._texts: list[str] = []
        """Answers of the policy."""
        self._said: dict[bytes, Said] = {}
        """By the digest of their tools and messages, the policy's too."""
        self._handlers: set[asyncio.Task[Any]] = set()
        """Of the requests in flight."""
        self._asked = asyncio.Event()
        """Set while a request is in flight."""
        self._quiet = asyncio.Event()
        """Set while none is."""
        self._quiet.set()

    def begin(self) -> Agent:
        """Begin a try of the run."""
        self.unasked = set(self._record)
        for entry in self._record:
            entry.reader = None
        self._agent = replace(self._agent, api_key=secrets.token_urlsafe(32))
        self._sessions[self._agent.api_key] = self
        return self._agent

    def end(self) -> None:
        """End the try: what is left of it asks nothing any more."""
        self._sessions.pop(self._agent.api_key, None)
        for handler in self._handlers:
            handler.cancel()

    async def silent(self) -> None:
        """Return once no request was in flight for the limit."""
        while True:
            await self._quiet.wait()
            try:
                async with time_limit(self._settings.timeout_s):
                    await self._asked.wait()
            except TimeoutError:
                return

    def responses(self) -> Sequence[str]:
        """The policy's answers; none where what was sampled is not of one run."""
        if self.unasked:
            return []
        return self._texts

    async def close(self) -> None:
        """End the last try and all requests in progress."""
        self.end()
        await cancelled(self.over, *self._handlers, *(entry.answer for entry in self._record))

    async def answer(self, path: str, data: bytes) -> web.Response:
        """The answer to a request, on record or new."""
        handler: Any = asyncio.current_task()
        self._handlers.add(handler)
        self._quiet.clear()
        self._asked.set()
        try:
            entry = self._entry(path, data)
            entry.reader = handler
            self.unasked.discard(entry)
            try:
                status, kind, body = await asyncio.shield(entry.answer)
            except asyncio.CancelledError:  # the agent has hung up, and may ask again, or has done so
                if entry.reader is handler:
                    entry.reader = None
                    waiting = {other.digest for other in self._record if other.reader and not other.answer.done()}
                    if entry.digest in waiting and not entry.answer.done():
                        self._record.remove(entry)
                        await cancelled(entry.answer)
                raise
            return web.Response(status=status, content_type=kind, body=body)
        finally:
            self._handlers.remove(handler)
            if not self._handlers:
                self._asked.clear()
                self._quiet.set()

    def _entry(self, path: str, data: bytes) -> _Entry:
        # the key may be in the body, and each try has another one
        data = data.replace(self._agent.api_key.encode(), b"")
        digest = hashlib.sha256(path.encode() + data).digest()
        for entry in self._record:
            if entry.digest == digest and not entry.reader:
                return entry
        if self.over.done():
            raise web.HTTPGone(text=GONE)
        entry = _Entry(digest, asyncio.create_task(self._new(path, data, self._requests)))
        self._requests += 1
        self._record.append(entry)
        return entry

    async def _new(self, path: str, data: bytes, number: int) -> Reply:
        """The answer to a new request. number: in the episode, from 0."""
        try:
            if number >= self._settings.max_turns:
                raise LimitReached("environment.max_turns")
            if len(data) > self._most_bytes:
                raise LimitReached(f"a request of {len(data)} bytes leaves no room (environment.episode_tokens)")
            try:
                request = _read(path, data)
                asked = await (self._messages(request) if path == CHAT else self._ids(request))
            except REFUSED as problem:
                return _refusal(400, f"{problem} (docs/environments.md says what a request may have)")
            most = min(filter(None, (request.max_tokens, request.max_completion_tokens)), default=None)
            limits = {"most": most, "stop": request.stop or ()}
            part, turn, decoded = await self._ask(asked.context, number=number, tools=asked.tools, **limits)
            self._texts.append(decoded.text or "")
            if path == CHAT:
                return self._message(request, asked, part, turn, decoded)
            values = zip(turn.token_ids, read(decoded.data).rollout_logprobs.tolist())
            scored = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in values]
            choice = {"token_ids": turn.token_ids, "logprobs": {"content": scored}}
            return _json({"choices": [FINISHED | choice]})
        except (LimitReached, CompletionLost, RuntimeError, *REFUSED) as end:  # a defect of ours ends the run
            if not self.over.done():
                self.over.set_exception(end)
            return _refusal(410, GONE)

    async def _ids(self, request: _Body) -> _Asked:
        """Ids after ids, in the form of vLLM."""
        largest = max(request.token_ids, default=self._vocabulary)
        if largest >= self._vocabulary:
            raise ValueError(f"token_ids: they have to be ids below {self._vocabulary}, at least one")
        return _Asked(context=request.token_ids)

    async def _messages(self, request: _Body) -> _Asked:
        """A message after messages, of which the longest conversation is known that has been answered."""
        messages = list(map(_plain, request.messages))
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages: the last one has to be of user, tool or system")
        tools = msgspec.json.encode(request.tools or []).decode()
        digest = hashlib.sha256(tools.encode())
        before = Said()
        known = 0
        for size, message in enumerate(messages, 1):
            digest.update(msgspec.json.encode(message, order="sorted"))
            if digest.digest() in self._said:
                before = self._said[digest.digest()]
                known = size
        said = replace(before, messages=(*before.messages, messages[known:]))
        async with self._rendering:
            ids, whole = await self._decoders.render(said.messages, said.turns, replace(self._talk, tools=tools))
        context = ids.tolist()
        if not whole:
            context = [*said.part.context[: said.tokens], *context]
        return _Asked(context=context, tools=tools, said=said, digest=digest)

    def _message(self, request: _Body, asked: _Asked, part: Part, turn: PastTurn, decoded: Decoded) -> Reply:
        """The answer to messages."""
        message = _message(decoded, f"call_{len(self._said)}", request.stop or ())
        size = len(asked.context) + len(turn.token_ids)
        asked.digest.update(msgspec.json.encode(_plain(msgspec.convert(message, _Message)), order="sorted"))
        turns = (*asked.said.turns, turn)
        self._said[asked.digest.digest()] = replace(asked.said, turns=turns, part=part, tokens=size)
        usage = {"prompt_tokens": len(asked.context), "completion_tokens": len(turn.token_ids), "total_tokens": size}
        choice = dict(FINISHED)
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
        answer = {"id": f"turn-{len(self._said)}", "created": 0, "model": MODEL, "usage": usage}
        if request.stream:
            answer |= {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            return 200, "text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer)
        return _json(answer | {"object": "chat.completion", "choices": [choice | {"message": message}]})


FINISHED = {"index": 0, "finish_reason": "stop"}


def _read(path: str, data: bytes) -> _Body:
    """A request. Raises ValueError, RecursionError for what is none, and for settings that are not honored."""
    body = msgspec.json.decode(data, type=dict[str, Any])
    body |= msgspec.convert(body.get("sampling_params", {}), dict[str, Any])
    taken = [*_Body.__struct_fields__, *IGNORED.split()]
    if path == GENERATE:
        taken += OF_IDS.split()
    refused = [name for name in body.keys() - set(taken) if body[name] not in (None, *ALLOWED.get(name, ()))]
    if refused:
        raise ValueError(f"{', '.join(refused)}: leave it out, as the run decides how its policy is sampled")
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    return msgspec.convert(body, _Body)


def _json(value: dict[str, Any], status: int = 200) -> Reply:
    return status, "application/json", msgspec.json.encode(value)


def _refusal(status: int, text: str) -> Reply:
    """An error as OpenAI's client reads it."""
    text = text.encode(errors="replace").decode()
    return _json({"error": {"message": text, "type": "invalid_request_error", "code": status}}, status)


@web.middleware
async def _refusing(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answers what the route refuses."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as refused:
        text = NO_ROUTE if refused.status in (404, 405) else refused.text
        status, kind, body = _refusal(refused.status, text or "")
        return web.Response(status=status, content_type=kind, body=body)


def _plain(message: _Message) -> Message:
    """A message for the chat template, equal to another one if both say the same."""
    text = message.content or ""
    if not isinstance(text, str):
        text = "".join(part.text for part in text)
    plain: Message = {"role": message.role, "content": text}
    names: dict[str, Any] = {"name": message.name, "tool_call_id": message.tool_call_id}
    if message.role == "developer":
        plain["role"] = "system"
    if message.role == "assistant":
        # the policy's text may come back without the space around it
        plain["content"] = text.strip()
        names = {"tool_calls": list(map(_called, message.tool_calls or ()))}
    return plain | {name: value for name, value in names.items() if value}


def _called(call: _Call) -> dict[str, Any]:
    """A call as chat templates read it: arguments are no text if they are JSON."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(ValueError, RecursionError):
        arguments = msgspec.json.decode(arguments)
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}


def _message(decoded: Decoded, prefix: str, stops: Sequence[str]) -> dict[str, Any]:
    """The policy's message. A call that cannot be read stays in its text.

    prefix: of ids that no format gives. stops: texts with which the message ends, and which it does not have.
    """
    content = decoded.text or ""
    readable = [call for call in decoded.tool_calls if not call.error]
    if readable:
        content = decoded.before_calls + "".join(call.raw for call in decoded.tool_calls if call.error)
    for stop in stops:
        content, _, _ = content.partition(stop)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if readable:
        message["tool_calls"] = [
            {
                "index": index,
                "id": call.id or f"{prefix}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for index, call in enumerate(readable)
        ]
    return message


class _Refused(asyncio.Protocol):
    """A connection beyond the bound."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


class AgentServer:
    """The server of all sessions; `async with` starts and closes it.

    Connections: at most half of the files that this process may open (`launch.hosts.files_needed`), whoever has them.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        """By the keys of their tries."""
        self._key = secrets.token_urlsafe(32)
        """`Agent.route_key`."""
        self._strangers: dict[Any, float] = {}
        """Connections that have shown no known key, the oldest first -> when they came (time of the loop)."""
        self._cut: deque[bool] = deque(maxlen=ENDS)
        """Whether `max_tokens` ended the latest episodes."""

    async def __aenter__(self) -> AgentServer:
        application = web.Application(client_max_size=BODY_BYTES, middlewares=[_refusing])
        application.router.add_get("/v1/models", self._models)
        for path in (GENERATE, CHAT):
            application.router.add_post(path, self._post)
        # a handler ends when its agent hangs up
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, keepalive_timeout=BODY_S, shutdown_timeout=1.0
        )
        await self._runner.setup()
        self._server = await asyncio.get_running_loop().create_server(self._protocol, HOST, 0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await self._runner.cleanup()

    def _protocol(self) -> asyncio.BaseProtocol:
        server: Any = self._runner.server
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 < files // 2 <= len(server.connections):  # without a limit it is negative
            return _Refused()
        protocol: asyncio.BaseProtocol = server()
        now_s = asyncio.get_running_loop().time()
        self._strangers[protocol] = now_s
        for oldest, came_s in list(self._strangers.items())[:-MOST_STRANGERS]:
            if now_s - came_s >= STRANGER_S:
                del self._strangers[oldest]
                oldest.force_close()
        return protocol

    @contextlib.asynccontextmanager
    async def session(self, *arguments: Any, **limits: Any) -> AsyncIterator[Session]:
        """A session in a block; the arguments of `Session` after its address."""
        port = self._server.sockets[0].getsockname()[1]
        agent = Agent(base_url=f"http://{HOST}:{port}/v1", api_key="", model=MODEL, route_key=self._key)
        session = Session(self._sessions, agent, *arguments, **limits)
        try:
            yield session
        finally:
            self._cut.append(session.over.done() and isinstance(session.over.exception(), AnswerCut))
            await session.close()
        if sum(self._cut) > 0.9 * ENDS:
            logger.warning(
                "max_tokens of the agent's requests has truncated %d of the latest %d episodes, which are "
                "not trained; raise it, or leave it out",
                sum(self._cut),
                ENDS,
            )
            self._cut.clear()

    def _admit(self, request: web.Request) -> str:
        """The key of a request, whose body may then be read. Raises HTTPUnauthorized."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions and request.headers.get(ROUTE_HEADER) != self._key:
            raise web.HTTPUnauthorized(text=UNKNOWN)
        self._strangers.pop(request.protocol, None)
        return key

    def _of(self, key: str, data: bytes) -> Session:
        """The session of a key, or of the body's cache_salt (`environments.verifiers`). Raises HTTPUnauthorized."""
        if key not in self._sessions:
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                key = msgspec.json.decode(data, type=_Salted).cache_salt
        session = self._sessions.get(key)
        if session is None:
            raise web.HTTPUnauthorized(text=UNKNOWN)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _post(self, request: web.Request) -> web.Response:
        key = self._admit(request)
        try:
            async with time_limit(BODY_S):
                data = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        session = self._of(key, data)
        return await session.answer(request.path, data)

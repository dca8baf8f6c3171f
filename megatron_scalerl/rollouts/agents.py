"""The HTTP server on loopback by which agents ask the policy, with a session for each episode.

    run(row, agent) --POST /v1/chat/completions, /inference/v1/generate--> Session --context--> ask() --> engine

The life of a session:

    begin      a try of `run` gets a key, which only the server and this try's agent know
    request    token ids are the context as sent; messages are rendered after the longest known conversation that the
               messages continue, whose ids are kept. `rollouts.trace` says which part the context continues
    answer     token ids to a request with token ids, else a message, perhaps with calls of tools
    end        the try's key becomes unknown, and requests in progress are cancelled
    close      sampling in progress is cancelled

Each request is recorded with the answer. If `run` is tried again after a failure, a request that equals a recorded
request gets the recorded answer, each answer once, so that nothing is sampled twice; all further requests are new. An
agent may repeat requests in a new order, so a recorded request that stays `unasked` counts as a failure only at the
end of the run. `over` has the error that ended the episode: a limit, or an error of the engine.

An agent is not trusted. The numbers of connections with and without a known key are bounded, and the time and bytes
of a body, which is read only with a known key. An episode has at most environment.max_turns requests, and one
request is rendered at a time. Ids have to be in the vocabulary. Of a request's settings only stop strings and the
largest number of tokens have an effect on sampling. A refusal has the form of an error of OpenAI's API.
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
"""Largest size of a request's body (bytes)."""
BODY_S = 60.0
"""Time limit for a request's body to arrive, and time after which an idle connection is closed (s)."""
TOKEN_BYTES = 16
"""Largest size of a request's body for each token of a context (bytes), in addition to OTHER_BYTES.

An id takes at most 8 bytes, a token of text about 5 bytes. Special tokens take a decoder process 16 us per byte.
"""
OTHER_BYTES = 2**16
"""Largest size of a request's body without the bytes of the context (bytes)."""
IGNORED_SETTINGS = """
    model user metadata store service_tier safety_identifier prompt_cache_key stream_options priority cache_salt
    sampling_params temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty
"""
"""Settings of a request that have no effect: the run decides how the policy is sampled."""
ID_CLIENT_SETTINGS = "stop_token_ids logprobs skip_special_tokens return_token_ids routed_experts_prompt_start"
"""Settings, besides IGNORED_SETTINGS, that have no effect in requests with token ids: every answer to such a request
has token ids with log-probs."""
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "content_parts": ([],),
}
"""Setting of a request that the server does not support -> values that are allowed, besides null. Unsupported
settings without an entry have to be null."""


MOST_STRANGERS = 256
"""Largest number of connections without a known API key; beyond this, the oldest are closed once STRANGER_S old."""
STRANGER_S = 5.0
"""Time that a connection without a known API key is open at least (s), since many agents may connect at once."""
ENDS = 64
"""Number of latest episodes that are watched: a warning is logged if `max_tokens` truncated over 90 %."""
UNKNOWN = "the API key belongs to no episode in progress: send agent.api_key of this call of run"
GONE = "the episode has ended by a limit, such as environment.max_turns, so the call of run is cancelled"
NO_ROUTE = f"the path is unknown: use POST {CHAT}, POST {GENERATE} or GET /v1/models"
REQUEST_ERRORS = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a malformed request may cause; the server then refuses the request."""


class LimitReached(Exception):
    """A limit, such as environment.max_turns, ended the episode."""


class AnswerCut(LimitReached):
    """An answer reached `max_tokens` of the agent's request, which ended the episode."""


Ask = Callable[..., Awaitable[tuple[Part, PastTurn, Decoded]]]
"""A function that samples the policy's next turn: (context [N], number, max_tokens, tools, stop) -> (part of the
episode, turn, decoded completion). `EpisodeSampler._ask` explains the arguments."""


@record
class Conversation:
    """A conversation that ends with a turn of the policy. The token ids of the whole conversation are known."""

    messages: tuple[list[Message], ...] = ()
    """[turns] the environment's messages before each turn of the policy."""
    turns: tuple[PastTurn, ...] = ()
    part: Part = Part(array("I"), 0)
    tokens: int = 0
    """Number of tokens of `part` up to the end of the last turn."""


@record
class _Job:
    """A request, converted to the token ids after which the policy samples the answer."""

    context: list[int]
    tools: str = "[]"
    """The tools as JSON."""
    conversation: Conversation = Conversation()
    """The longest known conversation that the request continues, with the request's new messages added."""
    digest: Any = None
    """Hash object of tools and messages; `_message` adds the policy's answer."""


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
    """The body of a request with messages or token ids. Fields of sampling_params count as fields of the body."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    messages: list[_Message] = []
    tools: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stop: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(max_length=16)] | None = None
    """Stop strings: texts at which the answer ends."""


Reply = tuple[int, str, bytes]
"""(HTTP status, content type, body) of an answer, which may be sent several times."""


@dataclass(eq=False)
class _Entry:
    """A recorded request of an agent, with the answer."""

    digest: bytes
    answer: asyncio.Task[Reply]
    reader: Any = None
    """Task of the HTTP request in this try that has sent the answer or waits for the answer; else None."""


class Session:
    """One episode of an agent; implements `environments.pool.Session`."""

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
        """sessions: the server's dict of key -> session with a try in progress. agent: the server's address, without
        a key. vocabulary: number of token ids of the policy. tokens: largest number of tokens of a context."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets the exception which ends the episode, such as LimitReached."""
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
        """Recorded requests of earlier tries that the agent has not repeated in this try."""
        self._texts: list[str] = []
        """Texts of the policy's answers."""
        self._conversations: dict[bytes, Conversation] = {}
        """Digest of the tools and of all messages up to a turn of the policy -> the conversation up to that turn."""
        self._handlers: set[asyncio.Task[Any]] = set()
        """The tasks that handle the HTTP requests in flight."""
        self._request_in_flight = asyncio.Event()
        """Event that is set while a request is in flight."""
        self._no_request = asyncio.Event()
        """Event that is set while no request is in flight."""
        self._no_request.set()

    def begin(self) -> Agent:
        """Begin a try of `run`; returns the argument of `run`, with a new key."""
        self.unasked = set(self._record)
        for entry in self._record:
            entry.reader = None
        self._agent = replace(self._agent, api_key=secrets.token_urlsafe(32))
        self._sessions[self._agent.api_key] = self
        return self._agent

    def end(self) -> None:
        """End the try: from now on the server refuses the key, and requests in progress are cancelled."""
        self._sessions.pop(self._agent.api_key, None)
        for handler in self._handlers:
            handler.cancel()

    async def silent(self) -> None:
        """Return once no request has been in flight for environment.timeout_s seconds."""
        while True:
            await self._no_request.wait()
            try:
                async with time_limit(self._settings.timeout_s):
                    await self._request_in_flight.wait()
            except TimeoutError:
                return

    def responses(self) -> Sequence[str]:
        """The policy's answers in the last try; empty if the agent did not repeat all recorded requests."""
        if self.unasked:
            return []
        return self._texts

    async def close(self) -> None:
        """End the last try and all requests in progress."""
        self.end()
        await cancelled(self.over, *self._handlers, *(entry.answer for entry in self._record))

    async def answer(self, path: str, data: bytes) -> web.Response:
        """The answer to an agent's request: the recorded answer to an equal request, or a new answer."""
        handler: Any = asyncio.current_task()
        self._handlers.add(handler)
        self._no_request.clear()
        self._request_in_flight.set()
        try:
            entry = self._entry(path, data)
            entry.reader = handler
            self.unasked.discard(entry)
            try:
                status, kind, body = await asyncio.shield(entry.answer)
            except asyncio.CancelledError:
                # The agent has hung up, and may ask again. If the agent already awaits an equal request, the answer
                # to this request is not needed.
                if entry.reader is handler:
                    entry.reader = None
                    awaited = {e.digest for e in self._record if e.reader and not e.answer.done()}
                    if entry.digest in awaited and not entry.answer.done():
                        self._record.remove(entry)
                        await cancelled(entry.answer)
                raise
            return web.Response(status=status, content_type=kind, body=body)
        finally:
            self._handlers.remove(handler)
            if not self._handlers:
                self._request_in_flight.clear()
                self._no_request.set()

    def _entry(self, path: str, data: bytes) -> _Entry:
        # The body may contain the key, which differs between tries.
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
        """The reply to a new request. At a limit the episode ends. number: number of the request, from 0."""
        try:
            if number >= self._settings.max_turns:
                raise LimitReached("environment.max_turns")
            if len(data) > self._most_bytes:
                raise LimitReached(f"a request has {len(data)} bytes, too many for environment.episode_tokens")
            try:
                request = _read(path, data)
                job = await (self._messages(request) if path == CHAT else self._ids(request))
            except REQUEST_ERRORS as problem:
                return _refusal(400, f"{problem} (docs/environments.md lists the allowed settings)")
            max_tokens = min(filter(None, (request.max_tokens, request.max_completion_tokens)), default=None)
            limits = {"max_tokens": max_tokens, "stop": request.stop or ()}
            part, turn, decoded = await self._ask(job.context, number=number, tools=job.tools, **limits)
            self._texts.append(decoded.text or "")
            if path == CHAT:
                return self._message(request, job, part, turn, decoded)
            values = zip(turn.token_ids, read(decoded.data).rollout_logprobs.tolist())
            scored = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in values]
            choice = {"token_ids": turn.token_ids, "logprobs": {"content": scored}}
            return _json({"choices": [FINISHED | choice]})
        except (LimitReached, CompletionLost, RuntimeError, *REQUEST_ERRORS) as end:
            # Errors of a malformed request are handled above; here such an error is a defect of this program.
            if not self.over.done():
                self.over.set_exception(end)
            return _refusal(410, GONE)

    async def _ids(self, request: _Body) -> _Job:
        """Convert a request with token ids (vLLM's generate endpoint). Raises ValueError for invalid ids."""
        largest = max(request.token_ids, default=self._vocabulary)
        if largest >= self._vocabulary:
            raise ValueError(f"token_ids: send at least one id, and only ids below {self._vocabulary}")
        return _Job(context=request.token_ids)

    async def _messages(self, request: _Body) -> _Job:
        """Convert a request with messages. The ids of a known conversation that the messages continue are kept."""
        messages = list(map(_plain_message, request.messages))
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("messages: the last message has to have the role user, tool or system")
        tools = msgspec.json.encode(request.tools or []).decode()
        digest = hashlib.sha256(tools.encode())
        answered = Conversation()
        known_size = 0
        for size, message in enumerate(messages, 1):
            digest.update(msgspec.json.encode(message, order="sorted"))
            if digest.digest() in self._conversations:
                answered = self._conversations[digest.digest()]
                known_size = size
        conversation = replace(answered, messages=(*answered.messages, messages[known_size:]))
        async with self._rendering:
            ids, rewritten = await self._decoders.render(
                conversation.messages, conversation.turns, replace(self._talk, tools=tools)
            )
        context = ids.tolist()
        if not rewritten:
            context = [*conversation.part.context[: conversation.tokens], *context]
        return _Job(context=context, tools=tools, conversation=conversation, digest=digest)

    def _message(self, request: _Body, job: _Job, part: Part, turn: PastTurn, decoded: Decoded) -> Reply:
        """The reply to a request with messages."""
        message = _message(decoded, f"call_{len(self._conversations)}", request.stop or ())
        size = len(job.context) + len(turn.token_ids)
        job.digest.update(msgspec.json.encode(_plain_message(msgspec.convert(message, _Message)), order="sorted"))
        turns = (*job.conversation.turns, turn)
        self._conversations[job.digest.digest()] = replace(job.conversation, turns=turns, part=part, tokens=size)
        usage = {
            "prompt_tokens": len(job.context),
            "completion_tokens": len(turn.token_ids),
            "total_tokens": size,
        }
        choice = dict(FINISHED)
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
        answer = {"id": f"turn-{len(self._conversations)}", "created": 0, "model": MODEL, "usage": usage}
        if request.stream:
            answer |= {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            return 200, "text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer)
        return _json(answer | {"object": "chat.completion", "choices": [choice | {"message": message}]})


FINISHED = {"index": 0, "finish_reason": "stop"}


def _read(path: str, data: bytes) -> _Body:
    """Decode a request's body. Raises ValueError or RecursionError for a malformed body, and ValueError for a setting
    that neither the server knows nor ALLOWED_VALUES allows."""
    body = msgspec.json.decode(data, type=dict[str, Any])
    body |= msgspec.convert(body.get("sampling_params", {}), dict[str, Any])
    known_names = [*_Body.__struct_fields__, *IGNORED_SETTINGS.split()]
    if path == GENERATE:
        known_names += ID_CLIENT_SETTINGS.split()
    refused_names = [
        name for name in body.keys() - set(known_names) if body[name] not in (None, *ALLOWED_VALUES.get(name, ()))
    ]
    if refused_names:
        raise ValueError(f"{', '.join(refused_names)}: leave it out, since the run decides how the policy is sampled")
    if isinstance(body.get("stop"), str):
        body["stop"] = [body["stop"]]
    return msgspec.convert(body, _Body)


def _json(value: dict[str, Any], status: int = 200) -> Reply:
    return status, "application/json", msgspec.json.encode(value)


def _refusal(status: int, text: str) -> Reply:
    """The reply that refuses a request, in the form of an error of OpenAI's API."""
    text = text.encode(errors="replace").decode()
    return _json({"error": {"message": text, "type": "invalid_request_error", "code": status}}, status)


@web.middleware
async def _refusing(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turns aiohttp's refusals into the form of errors of OpenAI's API."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as refusal:
        text = NO_ROUTE if refusal.status in (404, 405) else refusal.text
        status, kind, body = _refusal(refusal.status, text or "")
        return web.Response(status=status, content_type=kind, body=body)


def _plain_message(message: _Message) -> Message:
    """An agent's message in the form for the chat template, in which messages of equal meaning are equal."""
    text = message.content or ""
    if not isinstance(text, str):
        text = "".join(part.text for part in text)
    fields: Message = {"role": message.role, "content": text}
    names: dict[str, Any] = {"name": message.name, "tool_call_id": message.tool_call_id}
    if message.role == "developer":
        fields["role"] = "system"
    if message.role == "assistant":
        # An agent may strip white space before it sends the policy's text back, so white space does not count.
        fields["content"] = text.strip()
        names = {"tool_calls": list(map(_plain_call, message.tool_calls or ()))}
    return fields | {name: value for name, value in names.items() if value}


def _plain_call(call: _Call) -> dict[str, Any]:
    """A tool call in the form for chat templates: arguments that are JSON become objects."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(ValueError, RecursionError):
        arguments = msgspec.json.decode(arguments)
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}


def _message(decoded: Decoded, prefix: str, stops: Sequence[str]) -> dict[str, Any]:
    """The policy's answer as a chat message. A tool call that cannot be read stays in the text.

    prefix: start of the id that a tool call without an id gets. stops: stop strings, before which the message ends.
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


class _RefusedConnection(asyncio.Protocol):
    """Closes a new connection at once, since the server already has as many connections as are allowed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.close()


class AgentServer:
    """The HTTP server of all sessions; `async with` starts and closes the server.

    The number of connections is at most half of the files that this process may open (`launch.hosts.files_needed`).
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        """API key of a try in progress -> session."""
        self._key = secrets.token_urlsafe(32)
        """Route key (`Agent.route_key`), by which the server admits clients that serve many episodes."""
        self._strangers: dict[Any, float] = {}
        """Connection without a known key so far -> time of arrival (s, time of the event loop), the oldest first."""
        self._cut: deque[bool] = deque(maxlen=ENDS)
        """For each of the latest ENDS episodes, whether `max_tokens` of an agent's request ended the episode."""

    async def __aenter__(self) -> AgentServer:
        application = web.Application(client_max_size=BODY_BYTES, middlewares=[_refusing])
        application.router.add_get("/v1/models", self._models)
        for path in (GENERATE, CHAT):
            application.router.add_post(path, self._post)
        # The option handler_cancellation ends a handler when the agent hangs up.
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
        # `files` is negative if this process may open any number of files.
        if 0 < files // 2 <= len(server.connections):
            return _RefusedConnection()
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
        """Context with the session of a new episode. arguments, limits: the arguments of `Session` after `agent`."""
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
                "not trained on; raise max_tokens in the agent, or leave the setting out",
                sum(self._cut),
                ENDS,
            )
            self._cut.clear()

    def _admit(self, request: web.Request) -> str:
        """The API key in the headers. Raises HTTPUnauthorized if neither this key nor the route key is known."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions and request.headers.get(ROUTE_HEADER) != self._key:
            raise web.HTTPUnauthorized(text=UNKNOWN)
        self._strangers.pop(request.protocol, None)
        return key

    def _session_of(self, key: str, data: bytes) -> Session:
        """The session of the API key, from the header or the body's cache_salt. Raises HTTPUnauthorized."""
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
        session = self._session_of(key, data)
        return await session.answer(request.path, data)

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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.environments.response import Agent, Message, ToolCall
from megatron_scalerl.processes.child_process import cancelled, time_limit
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.recipe.sections import EnvironmentSection
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.decoder import Decoded
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.trace import Part
from megatron_scalerl.types import CompletionLost

HOST = "127.0.0.1"
MODEL = "policy"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
BODY_BYTES = 2**22
"""Most bytes of a request: half a million tokens."""
CALL = "<tool_call>"
"""Text with which calls begin in all formats of `rollouts.tool_calls`."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tool_choice": ("auto",),
    "content_parts": ([],),
    "features": (),
}
"""Settings that a request may have with these values alone, or null."""


class LimitReached(Exception):
    """A limit ended the episode."""


Ask = Callable[..., Awaitable[tuple[Part, PastTurn, Decoded]]]
"""Samples a turn after a context [N], as `EpisodeSampler._ask`."""


@record
class Said:
    """A conversation after a turn of the policy."""

    tools: str
    """As JSON."""
    flat: list[Message]
    """All messages, the policy's too."""
    messages: tuple[list[Message], ...]
    """[turns] those before each turn."""
    turns: tuple[PastTurn, ...]
    context: tuple[Part, int]
    """The part, and its tokens up to here."""


class _Text(msgspec.Struct):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


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


Reply = tuple[int, str, bytes]
"""(status, type, body) of an answer, which may be sent several times."""


@dataclass
class _Entry:
    """A request on record."""

    digest: bytes
    answer: asyncio.Task[Reply]
    delivered: bool = False
    """Whether the try in progress has got the answer, or waits for it."""


class Session:
    """One episode of an agent; `environments.pool.Session` says what its pool needs."""

    def __init__(self, agent: Agent, settings: EnvironmentSection, vocabulary: int, ask: Ask, decoders: DecoderPool):
        """vocabulary: ids of the tokenizer."""
        self.changed = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the error that ended the episode."""
        self._agent = agent
        self._ask = ask
        self._decoders = decoders
        self._settings = settings
        self._vocabulary = vocabulary
        self._record: list[_Entry] = []
        self.unasked = False
        """Whether an earlier try has asked what this one has not."""
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
        self.unasked = bool(self._record)
        for entry in self._record:
            entry.delivered = False
        return self._agent

    async def silent(self) -> None:
        """Return once no request was in flight for the limit."""
        while True:
            await self._quiet.wait()
            try:
                async with time_limit(self._settings.timeout_s):
                    await self._asked.wait()
            except TimeoutError:
                return

    async def close(self) -> None:
        """Cancel the requests in progress."""
        await cancelled(self.over, *(entry.answer for entry in self._record))

    async def answer(self, path: str, data: bytes) -> web.Response:
        """The answer to a request, on record or new."""
        self._in_flight += 1
        self._quiet.clear()
        self._asked.set()
        try:
            entry = self._entry(path, data)
            entry.delivered = True
            if all(entry.delivered for entry in self._record):
                self.unasked = False
            try:
                status, kind, body = await asyncio.shield(entry.answer)
            except asyncio.CancelledError:  # the agent has hung up, and may ask again
                entry.delivered = False
                raise
            return web.Response(status=status, content_type=kind, body=body)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._asked.clear()
                self._quiet.set()

    def _entry(self, path: str, data: bytes) -> _Entry:
        digest = hashlib.sha256(path.encode() + data).digest()
        for entry in self._record:
            if entry.digest == digest and not entry.delivered:
                return entry
        self.changed |= self.unasked
        if self.changed or self.over.done():
            raise web.HTTPGone(text=GONE)
        entry = _Entry(digest, asyncio.create_task(self._new(path, data, len(self._record))))
        self._record.append(entry)
        return entry

    async def _new(self, path: str, data: bytes, number: int) -> Reply:
        """The answer to a new request. number: in the episode, from 0."""
        try:
            if number >= self._settings.max_turns:
                raise LimitReached("environment.max_turns")
            body = msgspec.json.decode(data, type=dict[str, Any])
            body |= msgspec.convert(body.get("sampling_params", {}), dict[str, Any])
            refused = [name for name, values in ALLOWED.items() if body.get(name) not in (None, *values)]
            if refused:
                raise ValueError(f"{', '.join(refused)}: leave it out, as the run decides how its policy is sampled")
            request = msgspec.convert(body, _Body)
            most = min(filter(None, (request.max_tokens, request.max_completion_tokens)), default=None)
            ask = partial(self._ask, number=number, most=most)
            if path == CHAT:
                return await self._chat(request, ask)
            return await self._generate(request.token_ids, ask)
        # JSON that is too deep is a RecursionError, and that a RuntimeError
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as problem:
            return 400, "text/plain", str(problem).encode(errors="replace")
        except (LimitReached, CompletionLost, RuntimeError) as end:
            if not self.over.done():
                self.over.set_exception(end)
            return 410, "text/plain", GONE.encode()

    async def _generate(self, context: list[int], ask: Ask) -> Reply:
        """Ids after ids, in the form of vLLM."""
        largest = max(context, default=self._vocabulary)
        if largest >= self._vocabulary:
            raise ValueError(f"token_ids: they have to be ids below {self._vocabulary}, at least one")
        _, turn, decoded = await ask(context, tools="[]")
        values = zip(turn.token_ids, read(decoded.data).rollout_logprobs.tolist())
        scored = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in values]
        choice = {"token_ids": turn.token_ids, "logprobs": {"content": scored}}
        return _json({"choices": [FINISHED | choice]})

    async def _chat(self, request: _Body, ask: Ask) -> Reply:
        """A message after messages."""
        new = list(map(_plain, request.messages))
        if not new or new[-1]["role"] == "assistant":
            raise ValueError("messages: the last one has to be of user, tool or system")
        tools = msgspec.json.encode(request.tools or []).decode()
        flat: list[Message] = []
        before: tuple[list[Message], ...] = ()
        turns: tuple[PastTurn, ...] = ()
        context: list[int] = []
        for said in self._said:
            size = len(said.flat)
            if said.tools == tools and size > len(flat) and new[:size] == said.flat:
                flat = said.flat
                before = said.messages
                turns = said.turns
                part, size = said.context
                context = part.context[:size]
        new = new[len(flat) :]
        ids, whole = await self._decoders.render([*before, new], turns, tools=tools)
        if whole:
            context = []
        context += ids.tolist()
        part, turn, decoded = await ask(context, tools=tools)
        message = _message(decoded.text or "", decoded.tool_calls, f"call_{len(self._said)}")
        size = len(context) + len(turn.token_ids)
        said = Said(
            tools=tools,
            flat=[*flat, *new, _plain(msgspec.convert(message, _Message))],
            messages=(*before, new),
            turns=(*turns, turn),
            context=(part, size),
        )
        self._said.append(said)
        usage = {"prompt_tokens": len(context), "completion_tokens": len(turn.token_ids), "total_tokens": size}
        choice = dict(FINISHED)
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
        answer = {"id": f"turn-{len(self._said)}", "created": 0, "model": MODEL, "usage": usage}
        if request.stream:
            answer |= {"object": "chat.completion.chunk", "choices": [choice | {"delta": message}]}
            return 200, "text/event-stream", b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(answer)
        return _json(answer | {"object": "chat.completion", "choices": [choice | {"message": message}]})


FINISHED = {"index": 0, "finish_reason": "stop"}
GONE = "the episode has ended"


def _json(value: dict[str, Any]) -> Reply:
    return 200, "application/json", msgspec.json.encode(value)


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
        calls = [{"type": "function", "function": _function(call.function)} for call in message.tool_calls or ()]
        names = {"tool_calls": calls}
    return plain | {name: value for name, value in names.items() if value}


def _function(function: _Function) -> dict[str, Any]:
    """A call as chat templates read it: arguments are no text if they are JSON."""
    arguments: Any = function.arguments
    with contextlib.suppress(ValueError):
        arguments = msgspec.json.decode(arguments)
    return {"name": function.name, "arguments": arguments}


def _message(text: str, calls: Sequence[ToolCall], prefix: str) -> dict[str, Any]:
    """The policy's message. A call that cannot be read stays in its text. prefix: of the calls' ids."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    readable = [call for call in calls if not call.error]
    if readable:
        before, _, _ = text.partition(CALL)
        message["content"] = before + "".join(call.raw for call in calls if call.error)
        message["tool_calls"] = [
            {
                "index": index,
                "id": f"{prefix}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for index, call in enumerate(readable)
        ]
    return message


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
        # a handler ends when its agent hangs up
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    @contextlib.asynccontextmanager
    async def session(self, *arguments: Any) -> AsyncIterator[Session]:
        """A session in a block; the arguments of `Session` after its agent."""
        key = secrets.token_urlsafe(32)
        port = self._runner.addresses[0][1]
        agent = Agent(base_url=f"http://{HOST}:{port}/v1", api_key=key, model=MODEL)
        session = self._sessions[key] = Session(agent, *arguments)
        try:
            yield session
        finally:
            del self._sessions[key]
            await session.close()

    def _of(self, request: web.Request, data: bytes = b"") -> Session:
        """The session of a request, by its authorization or else its cache_salt (`environments.verifiers`)."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._sessions:
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                key = msgspec.json.decode(data, type=_Salted).cache_salt
        session = self._sessions.get(key)
        if session is None:
            raise web.HTTPUnauthorized(text="the key is of no episode in progress")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._of(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _post(self, request: web.Request) -> web.Response:
        data = await request.read()
        session = self._of(request, data)
        return await session.answer(request.path, data)

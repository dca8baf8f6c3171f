"""HTTP client of one engine: generate (tokens in, tokens out), pause and resume, info. Runs in the controller.

Every request carries the run's secret. The wait for the response to a generation has no time limit. Instead,
`engine.watchdog` detects an engine that stops producing tokens, and `launch.process` an engine that exits; then the
engine is evicted, and `abort` ends every request. The body of a response has to arrive within
engine.stall_timeout_s.
"""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, overload

import aiohttp
import msgspec

from megatron_scalerl.batching.rollout_bytes import rollout_of
from megatron_scalerl.engine.answers import (
    ADAPTER,
    NO_LOGPROBS,
    PROGRESS_PATH,
    EngineError,
    EngineInfo,
    EngineLost,
    EngineProgress,
    completion,
    convert,
    decode,
    prompt_logprobs,
)
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.processes.child_process import time_limit
from megatron_scalerl.recipe.process_sections import EngineSection
from megatron_scalerl.record import record
from megatron_scalerl.types import CompletionLost, Rollout

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SECRET_HEADER = "X-Run-Secret"
"""Header with the run's secret, which every path but /health requires."""

_GENERATE = "/inference/v1/generate"

WHOLE_DISTRIBUTION: dict[str, Any] = {
    "n": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop": [],
    "bad_words": [],
    "logit_bias": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
    "watermarking": False,
}
"""Sampling parameters of every request: sample from softmax(logits / temperature), as the trainer computes.

All parameters are sent, so that defaults of the policy's generation_config.json or of a later vLLM have no effect.
"""


@record
class SamplingSpec:
    """The settings with which one completion is sampled."""

    max_tokens: int
    """Largest number of tokens of the completion; the limit of the interruption plan counts if lower."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the likeliest token."""
    seed: int = 0
    seeded: bool = True
    """Whether the request sends `seed` to the engine (`options.training_seeds`); if not, `seed` is only recorded."""
    interruption: Plan | None = None
    """Plan for the forced end of thinking. None: nothing is forced, and only `max_tokens` limits the completion."""
    priority: int = 0
    """Priority of the request; the engine serves lower numbers first."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end the completion, besides the plan's end token and the end tokens in the policy's folder."""
    stop: tuple[str, ...] = ()
    """Stop strings: the completion ends with the first stop string, whose tokens the completion contains."""
    ignore_eos: bool = False
    """Whether to generate `max_tokens` tokens even after an end token, for measurements of speed."""


class Decoder(Protocol[T_co]):
    """Interface of an object that decodes the response to a generation request into a completion."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        """A context in which the caller reads and decodes one response body. Few slots keep few bodies in memory."""

    async def decode(self, body: bytes, *, plan: Plan | None, seed: int, where: str) -> tuple[T_co, int]:
        """Decode a body to (completion, number of tokens). Takes and raises the same as `answers.completion`."""


class _DecoderInProcess:
    """Decodes in this process, which blocks the event loop for 30 ms; used by checks that need few completions."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def decode(self, body: bytes, *, plan: Plan | None, seed: int, where: str) -> tuple[Rollout, int]:
        rollout = rollout_of(completion(body, plan=plan, seed=seed, source=where))
        return rollout, len(rollout.token_ids)


_IN_PROCESS = _DecoderInProcess()


class _Results(msgspec.Struct):
    results: list[Any]


class _WorldSize(msgspec.Struct):
    world_size: int


class _WeightInfo(msgspec.Struct):
    weight_version: str


_encode = msgspec.json.Encoder().encode


class EngineClient:
    """The HTTP interface of an engine, with connections that stay open until `close`."""

    def __init__(
        self,
        *,
        url: str,
        secret: str,
        name: str = "engine-0",
        settings: EngineSection | None = None,
        tls: ssl.SSLContext | None = None,
        adapter: bool = False,
    ):
        """Create a client of the engine at `url`: http://host:port, or https://host:port with `tls`.

        tls: the context that trusts the server's certificate. name: name of the engine for error messages. settings:
        None for the defaults. adapter: weight updates change only the policy's LoRA adapter, which all requests use,
        on top of the weights in the policy's folder.
        """
        self.url = url.rstrip("/")
        self._tls = tls
        self.name = name
        self.secret = secret
        self.in_flight = 0
        """Number of requests of this client on which the engine is still generating."""
        self.ended_generations = 0
        """Number of requests, in total, on which the engine no longer generates: answered, failed or cancelled."""
        self.paused = False
        """True from the call of `pause` until the engine has resumed."""
        self.produced_tokens = 0
        """Number of tokens that the engine has generated, as of the last progress report."""
        self.received_tokens = 0
        """Number of tokens of all completions that this client has received."""
        self._model = {"model": ADAPTER} if adapter else {}
        self._salt: dict[str, str] = {}
        self._aborted: str | None = None
        self._limits: set[asyncio.Timeout] = set()
        settings = settings or EngineSection()
        self._max_lost = settings.max_lost_in_a_row
        self._body_timeout_s = settings.stall_timeout_s
        self._lost_in_a_row = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; the engine aborts the requests in flight."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def abort(self, reason: str) -> None:
        """Let all present and future requests raise an EngineLost that names the engine and this reason."""
        if self._aborted is None:
            self._aborted = reason
            for limit in self._limits:
                limit.reschedule(0)

    @overload
    async def generate(self, prompt_token_ids: Sequence[int], *, sampling: SamplingSpec) -> Rollout: ...

    @overload
    async def generate(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingSpec, decoder: Decoder[T]
    ) -> T: ...

    async def generate(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingSpec, decoder: Decoder[Any] = _IN_PROCESS
    ) -> Any:
        """Generate a completion; returns the result of `decoder`, by default a Rollout decoded in this process.

        Cancelling the call aborts the request in the engine. Raises CompletionLost for a completion without
        log-probabilities, or if no decoder process can decode the response. Raises EngineError for all further
        failures, and for the last of engine.max_lost_in_a_row completions in a row without log-probabilities.
        """
        params = _sampling(sampling)
        body = self._salted({"token_ids": prompt_token_ids, "sampling_params": params, "priority": sampling.priority})
        async with contextlib.AsyncExitStack() as slot:
            with contextlib.ExitStack() as generating:
                generating.enter_context(self._generating())
                async with self._response("POST", _GENERATE, body) as response:
                    # The engine has finished generating: delays from here on do not look like a hanging engine.
                    generating.close()
                    await slot.enter_async_context(decoder.slot())
                    content = await self._content(response)
            return await self._counted(decoder, content, sampling)

    async def _counted(self, decoder: Decoder[T], content: bytes, sampling: SamplingSpec) -> T:
        """Decode a response. Raises EngineError after engine.max_lost_in_a_row answers without log-probabilities."""
        source = self._source(_GENERATE)
        try:
            decoded, tokens = await decoder.decode(
                content, plan=sampling.interruption, seed=sampling.seed, where=source
            )
        except CompletionLost as lost:
            if lost.reason != NO_LOGPROBS:
                raise
            self._lost_in_a_row += 1
            if self._lost_in_a_row < self._max_lost:
                raise
            raise EngineError(
                f"{self.name}: {self._lost_in_a_row} completions in a row had no usable log-probabilities "
                f"(engine.max_lost_in_a_row); the last error: {lost}"
            ) from None
        self._lost_in_a_row = 0
        self.received_tokens += tokens
        return decoded

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """[T - 1] the log-probs (nats) of token_ids[1:] [T], each given all earlier tokens. Raises EngineError."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        with self._generating():
            body = self._salted({"token_ids": token_ids, "sampling_params": params})
            content = await self._request("POST", _GENERATE, body)
        # A scoring request also generates one token, as max_tokens is 1.
        self.received_tokens += 1
        return prompt_logprobs(content, token_ids, self._source(_GENERATE))

    def _salted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of a request, with model name and cache salt added.

        The salt changes with every weight update, so that no request uses a prefix cached under earlier weights.
        """
        return body | self._model | self._salt

    async def progress(self) -> EngineProgress:
        """The server's own counts of tokens and requests for each core, known even if a core hangs.

        Raises EngineError.
        """
        progress = decode(await self.get(PROGRESS_PATH), EngineProgress, self._source(PROGRESS_PATH))
        self.produced_tokens = progress.tokens
        return progress

    async def info(self) -> EngineInfo:
        """Configuration and weights that the engine's workers report. Raises EngineError if the engine fails."""
        answers = await self.rpc("msrl_info")
        world = decode(await self.get("/get_world_size"), _WorldSize, self._source("/get_world_size"))
        label = decode(await self.get("/weight_info"), _WeightInfo, self._source("/weight_info"))
        source = f"{self._source('/collective_rpc')} msrl_info"
        common = {"world_size": world.world_size, "weight_version": label.weight_version}
        workers = [convert(answer, dict, source) for answer in answers]
        if not workers:
            raise EngineError(f"{source}: no worker of the engine has answered")
        digests = [worker.pop("weight_digest", None) for worker in workers]
        return convert({**workers[0], **common, "weight_digests": digests}, EngineInfo, source)

    async def rpc(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker; returns the answers in rank order. Raises EngineError if the call fails."""
        body = await self.post("/collective_rpc", {"method": method, "args": args})
        if not body:
            return []
        return decode(body, _Results, self._source("/collective_rpc")).results

    async def pause(self, *, clear_cache: bool) -> None:
        """Pause the engine between two steps of generation; all requests are kept.

        clear_cache: the engine drops the KV cache of the requests, and computes the cache again after `resume`.
        """
        self.paused = True
        await self.post("/pause", None, {"mode": "keep", "clear_cache": str(clear_cache).lower()})

    async def resume(self) -> None:
        """Let the engine continue to generate after `pause`."""
        await self.post("/resume", None)
        self.paused = False

    async def set_version(self, version: int) -> None:
        """Label the weights in the engine with a policy version."""
        await self.post("/update_weight_version", {"new_version": str(version)})
        self.note_version(version)

    def note_version(self, version: int) -> None:
        """Change the salt of cached prefixes, since the engine now has the weights of this policy version."""
        # The salt has a random part, since a trainer that starts again from a checkpoint repeats version numbers with
        # different weights.
        self._salt = {"cache_salt": f"{version}-{secrets.token_hex(8)}"}

    async def get(self, path: str) -> bytes:
        """The body of the response to a GET request. Raises EngineError if the request fails."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None = None) -> bytes:
        """The body of the response to a POST request with JSON. Raises EngineError if the request fails."""
        return await self._request("POST", path, body, query)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.ended_generations += 1

    def _source(self, path: str) -> str:
        return f"{self.name}: {path}"

    async def _request(self, method: str, path: str, body: Any, query: Mapping[str, str] | None = None) -> bytes:
        async with self._response(method, path, body, query) as response:
            return await self._content(response)

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Any, query: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Context with the response to a request, entered once the response's header has arrived.

        Raises EngineLost once `abort` is called, and EngineError if the connection fails.
        """
        # An aborted client may be closed already, and must not open a new session.
        if self._aborted is not None:
            raise EngineLost(f"{self.name}: {self._aborted}")
        data = None if body is None else _encode(body)
        headers = {}
        if path != _GENERATE:
            # After an internal error the server drops the connection, on which a later request would fail. So only
            # generations, for which many new connections would cost time, reuse connections.
            headers["Connection"] = "close"
        try:
            async with (
                self._until_aborted(),
                self._connections().request(
                    method, self.url + path, data=data, params=query, headers=headers, allow_redirects=False
                ) as response,
            ):
                yield response
        except (TimeoutError, aiohttp.ClientError) as err:
            if self._aborted is not None:
                raise EngineLost(f"{self.name}: {self._aborted}") from None
            raise EngineError(f"{self.name}: {method} {path}: {type(err).__name__}: {err}") from err

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        """Read a response's body. Raises EngineError after engine.stall_timeout_s, and if the status is not 200."""
        path = response.url.path
        try:
            async with time_limit(self._body_timeout_s):
                content = await response.read()
        except TimeoutError:
            raise EngineError(
                f"{self._source(path)}: only a part of the response came within {self._body_timeout_s:g} s of its "
                "header (engine.stall_timeout_s)"
            ) from None
        if response.status != 200:
            raise EngineError(f"{self.name}: {response.method} {path}: {response.status} {_reason(content)}")
        return content

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600, ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                headers={SECRET_HEADER: self.secret, "Content-Type": "application/json"},
                # No decompression: a small compressed response could become too large for the memory.
                auto_decompress=False,
            )
        return self._session

    @contextlib.asynccontextmanager
    async def _until_aborted(self) -> AsyncIterator[None]:
        """Context in which TimeoutError is raised when `abort` is called, at once if `abort` was called earlier."""
        async with asyncio.timeout(None if self._aborted is None else 0) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)


def _reason(content: bytes) -> str:
    """The error message in the body of an error response."""
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return content[:300].decode(errors="replace")
    for key in ("error", "message"):
        if isinstance(answer, dict):
            answer = answer.get(key, answer)
    return str(answer)[:1000]


def _sampling(spec: SamplingSpec) -> dict[str, Any]:
    plan = spec.interruption
    ends = set(spec.end_ids)
    params = WHOLE_DISTRIBUTION | {
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "stop_token_ids": [],
        "seed": spec.seed if spec.seeded else None,
        "logprobs": 0,
        "stop": list(spec.stop),
        "detokenize": bool(spec.stop),
        "ignore_eos": spec.ignore_eos,
    }
    if plan is not None:
        params["max_tokens"] = min(spec.max_tokens, plan.max_tokens)
        params["extra_args"] = plan.to_extra_args()
        ends.add(plan.eos_id)
    if not spec.ignore_eos:
        params["stop_token_ids"] = sorted(ends)
    return params

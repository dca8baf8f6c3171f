"""HTTP client of one engine: generate (tokens in, tokens out), pause and resume, info. Runs in the controller.

Every request carries the run's secret. A generation has no timeout until the response begins:
`engine.watchdog` detects an engine that stops producing tokens, `launch.process` an engine that exits, and `abort`
then ends every request. A response's body is limited in time.
"""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

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
"""Part of every request: sample from softmax(logits / temperature) alone, as the trainer computes. The defaults of
the policy's generation_config.json or of a later vLLM then do not count."""


@record
class SamplingSpec:
    """How one completion is sampled."""

    max_tokens: int
    """Budget of the whole completion (tokens); a lower limit of the interruption plan takes precedence."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the likeliest token."""
    seed: int = 0
    seeded: bool = True
    """False: the engine draws from a generator of its own, and `seed` only names the completion
    (`options.training_seeds`)."""
    interruption: Plan | None = None
    """Cut, phrase and answer budget. None: nothing is interrupted, and `max_tokens` alone limits the completion."""
    priority: int = 0
    """A request with a lower number is served first."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the completion, besides the plan's tokens and the end tokens in the policy's folder."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion. The tokens of such a text are sampled and returned like all tokens."""
    ignore_eos: bool = False
    """True: generate until the budget whatever is sampled, for measurements."""


class Decoder(Protocol[T_co]):
    """A parser of completions."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        """A block in which a response's body is read and decoded. Slots bound the bodies in memory."""

    async def decode(self, body: bytes, *, plan: Plan | None, seed: int, where: str) -> tuple[T_co, int]:
        """Decode a body to (completion, number of tokens). Arguments and errors are those of `answers.completion`."""


class _DecoderInProcess:
    """Decodes in this process, for checks of single completions: the event loop is blocked for up to 30 ms."""

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

        tls: the context that trusts the server's certificate. name: used in error messages. settings: None for the
        defaults. adapter: requests are for the policy's adapter, whose updates the engine gets, on the weights of the
        policy's folder.
        """
        self.url = url.rstrip("/")
        self._tls = tls
        self.name = name
        self.secret = secret
        self.in_flight = 0
        """Generations that this client is waiting for."""
        self.ended_generations = 0
        """Number of generations, in total, for which this client has stopped waiting."""
        self.paused = False
        """True from the request to pause until the engine has resumed."""
        self.produced_tokens = 0
        """Tokens that the engine has generated, as of the last progress report."""
        self.received_tokens = 0
        """Tokens of all completions that this client has received."""
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
        """End all present and future requests with an EngineLost that names the engine and this reason."""
        if self._aborted is None:
            self._aborted = reason
            for limit in self._limits:
                limit.reschedule(0)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingSpec,
        decoder: Decoder[T] = _IN_PROCESS,  # type: ignore[assignment]
    ) -> T:
        """A completion as `decoder` returns it, by default a Rollout that is decoded in this process.

        Cancelling the call aborts the request in the engine. Raises CompletionLost for a completion without
        log-probabilities or without a decoder process, EngineError for any other failure and for
        engine.max_lost_in_a_row completions in a row without log-probabilities.
        """
        params = _sampling(sampling)
        body = self._salted({"token_ids": prompt_token_ids, "sampling_params": params, "priority": sampling.priority})
        async with contextlib.AsyncExitStack() as slot:
            with contextlib.ExitStack() as generating:
                generating.enter_context(self._generating())
                async with self._response("POST", _GENERATE, body) as response:
                    # The engine has finished generating, so no later delay counts against the engine.
                    generating.close()
                    await slot.enter_async_context(decoder.slot())
                    content = await self._content(response)
            return await self._counted(decoder, content, sampling)

    async def _counted(self, decoder: Decoder[T], content: bytes, sampling: SamplingSpec) -> T:
        """Decode a completion. Raises EngineError where many completions in a row had no log-probabilities."""
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
                f"(engine.max_lost_in_a_row); the last one: {lost}"
            ) from None
        self._lost_in_a_row = 0
        self.received_tokens += tokens
        return decoded

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (nats) of token_ids[1:], each given the tokens before it. Raises EngineError."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        with self._generating():
            body = self._salted({"token_ids": token_ids, "sampling_params": params})
            content = await self._request("POST", _GENERATE, body)
        # The engine generates one token for a scoring request.
        self.received_tokens += 1
        return prompt_logprobs(content, token_ids, self._source(_GENERATE))

    def _salted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request with the present salt: only requests since the last version label share cached prefixes."""
        return body | self._model | self._salt

    async def progress(self) -> EngineProgress:
        """Token counts of the engine's cores, which the server keeps without asking the cores. Raises EngineError."""
        progress = decode(await self.get(PROGRESS_PATH), EngineProgress, self._source(PROGRESS_PATH))
        self.produced_tokens = progress.tokens
        return progress

    async def info(self) -> EngineInfo:
        """Configuration and weights, as reported by the engine's workers. Raises EngineError."""
        answers = await self.rpc("msrl_info")
        world = decode(await self.get("/get_world_size"), _WorldSize, self._source("/get_world_size"))
        label = decode(await self.get("/weight_info"), _WeightInfo, self._source("/weight_info"))
        source = f"{self._source('/collective_rpc')} msrl_info"
        common = {"world_size": world.world_size, "weight_version": label.weight_version}
        workers = [convert(answer, dict, source) for answer in answers]
        if not workers:
            raise EngineError(f"{source}: no worker has answered")
        digests = [worker.pop("weight_digest", None) for worker in workers]
        return convert({**workers[0], **common, "weight_digests": digests}, EngineInfo, source)

    async def rpc(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker, and return the workers' answers in rank order. Raises EngineError."""
        body = await self.post("/collective_rpc", {"method": method, "args": args})
        if not body:
            return []
        return decode(body, _Results, self._source("/collective_rpc")).results

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop the engine between two steps; every request is kept.

        clear_cache: the engine drops the requests' KV cache, and computes it again after `resume`.
        """
        self.paused = True
        await self.post("/pause", None, {"mode": "keep", "clear_cache": str(clear_cache).lower()})

    async def resume(self) -> None:
        """Let the engine continue after `pause`."""
        await self.post("/resume", None)
        self.paused = False

    async def set_version(self, version: int) -> None:
        """Label the weights in the engine with a policy version."""
        await self.post("/update_weight_version", {"new_version": str(version)})
        self.note_version(version)

    def note_version(self, version: int) -> None:
        """Note the version that labels the engine's weights, and change the salt of cached prefixes."""
        # The salt has a random part, since a trainer that starts again from a checkpoint reaches the same versions
        # again.
        self._salt = {"cache_salt": f"{version}-{secrets.token_hex(8)}"}

    async def get(self, path: str) -> bytes:
        """GET a path. Raises EngineError."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None = None) -> bytes:
        """POST JSON to a path. Raises EngineError."""
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
        """A block with the response to a request, entered when the header has arrived. `abort` ends the block as
        well."""
        # The client is closed, and must not open a session again.
        if self._aborted is not None:
            raise EngineLost(f"{self.name}: {self._aborted}")
        data = None if body is None else _encode(body)
        headers = {}
        if path != _GENERATE:
            # After an internal error the server drops the connection, and the next request on the connection would
            # fail. So only generations, which are many, reuse connections.
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
        """The body of a response. Raises EngineError for any status but 200, and after engine.stall_timeout_s."""
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
                # Decompression could turn a small response into a large one.
                auto_decompress=False,
            )
        return self._session

    @contextlib.asynccontextmanager
    async def _until_aborted(self) -> AsyncIterator[None]:
        """A block in which TimeoutError is raised once `abort` is called, and at once if `abort` was called
        before."""
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

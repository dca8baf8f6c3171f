"""What the controller says to one engine: tokens in and tokens out, pause and resume, and who are you.

Every request carries the run's secret. A generation has no time limit of its own: an engine that stops
answering is found by its health checks and by its process ending (`rollouts.engine`).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.interruption import Plan, tag
from megatron_scalerl.types import ExpertChoices, Rollout

SECRET_HEADER = "X-Run-Secret"
"""Every path but /health demands it."""


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
"""Said in every request: sample from softmax(logits / temperature) and from nothing else, which is what the trainer
computes, whatever defaults a policy's generation_config.json or a later vLLM has."""


class EngineError(RuntimeError):
    """An engine refused a request or broke off while answering it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """How one completion is sampled."""

    max_tokens: int
    """Budget of the whole completion; with a plan the plan's own limit holds if it is lower."""
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    interruption: Plan | None = None
    """Cut, phrase and answer budget; None: no interruption, one budget."""
    priority: int = 0
    """Lower is served first."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the completion, beside the plan's and those that vLLM finds in the policy's folder."""
    ignore_eos: bool = False
    """True generates to the budget whatever comes; for measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine says about itself, asked in its worker."""

    vocab_size: int
    """Rows of the logits."""
    dtype: str
    """Type of the weights as asked for: float32, bfloat16."""
    head_dtype: str
    """Precision of the logit projection, found on the logits of a probe, not in a setting."""
    logprobs_mode: str
    max_model_len: int
    """Longest prompt and completion together (tokens)."""
    pid: int
    world_size: int
    """Workers: tensor x pipeline x data parallel."""
    weight_version: str
    """Label of the weights in use."""
    weight_digest: str
    """Digest of the bytes of the last update, empty before the first."""
    attention_temperature: bool | None = None
    """Whether layers without RoPE scale their queries by position; None where the policy has no such layers."""


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Token] | None] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
_encode = msgspec.json.Encoder().encode


def check_engine(info: EngineInfo, recipe: Recipe) -> None:
    """Refuse an engine that does not compute what the trainer computes.

    Raises ValueError with the recipe's key, what it asks for and what the engine runs.
    """
    logits = "float32" if recipe.policy.logits == "fp32" else recipe.policy.dtype
    wanted = None if info.attention_temperature is None else attention_temperature(recipe)
    need = recipe.longest_sequence(phrase_tokens=0)
    for key, expected, found in (
        ("policy.dtype", recipe.policy.dtype, info.dtype),
        (f"policy.logits {recipe.policy.logits}", logits, info.head_dtype),
        ("rollouts.temperature", logprobs_mode(recipe), info.logprobs_mode),
        ("config.json: attn_temperature_tuning", wanted, info.attention_temperature),
    ):
        if expected != found:
            raise ValueError(f"{key}: expected {expected} in trainer and engine, found {found} in the engine")
    if info.max_model_len < need:
        raise ValueError(f"engine.vllm.max_model_len: expected at least {need}, found {info.max_model_len}")


def logprobs_mode(recipe: Recipe) -> str:
    """Which log-probs the engine reports: those of the policy, or those of its logits over the temperature."""
    return "raw_logprobs" if recipe.rollouts.temperature == 1 else "processed_logprobs"


def attention_temperature(recipe: Recipe) -> bool | None:
    """Whether the policy scales the queries of layers without RoPE by position (Llama 4); None for other families."""
    path = Path(recipe.policy.path) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    text = config.get("text_config") or config
    return bool(text.get("attn_temperature_tuning", True)) if text.get("model_type") == "llama4_text" else None


class EngineClient:
    """One engine's HTTP interface. Close it when done; it keeps its connections open."""

    def __init__(self, *, url: str, secret: str, name: str = "engine-0") -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way are aborted in the engine."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, prompt_token_ids: Sequence[int], *, sampling: SamplingSpec) -> Rollout:
        """One completion. Cancelling it aborts it in the engine. Raises EngineError."""
        body = {"token_ids": prompt_token_ids, "sampling_params": _sampling(sampling), "priority": sampling.priority}
        answer = _decode_answer(await self.post(_GENERATE, body))
        return _rollout(answer.choices[0], sampling)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs (nats) of token_ids[1:], each given the tokens before it. Raises EngineError."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        answer = _decode_answer(
            await self.post(_GENERATE, {"token_ids": token_ids, "sampling_params": params})
        )
        assert answer.prompt_logprobs is not None, "asked for prompt log-probs"
        rows = answer.prompt_logprobs[1:]
        return tuple(row[str(token)].logprob for row, token in zip(rows, token_ids[1:]) if row is not None)

    async def info(self) -> EngineInfo:
        """Ask the engine's workers what they run. Raises EngineError."""
        answers = await self.rpc("msrl_info")
        world = msgspec.json.decode(await self.get("/get_world_size"))["world_size"]
        label = msgspec.json.decode(await self.get("/weight_info"))["weight_version"]
        digests = {a["weight_digest"] for a in answers}
        if len(digests) != 1:
            raise EngineError(f"{self.name}: its workers hold different weights: {sorted(digests)}")
        return EngineInfo(world_size=world, weight_version=label, **answers[0])

    async def rpc(self, method: str, *args: str) -> list[Any]:
        """Call a method of every worker; their answers in the order of ranks."""
        body = await self.post("/collective_rpc", {"method": method, "args": args})
        return msgspec.json.decode(body)["results"] if body else []

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop between two steps and keep every request; clear_cache recomputes their KV cache on resume."""
        await self.post("/pause", None, {"mode": "keep", "clear_cache": str(clear_cache).lower()})

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        await self.post("/resume", None)

    async def set_version(self, version: int) -> None:
        """Label the weights that the engine holds already."""
        await self.post("/update_weight_version", {"new_version": str(version)})

    async def health(self) -> bool:
        """True if the engine answers and its core lives."""
        try:
            await self.get("/health")
        except (EngineError, OSError):
            return False
        return True

    async def get(self, path: str) -> bytes:
        """GET a path. Raises EngineError."""
        return await self._request("GET", path, None, None)

    async def post(self, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None = None) -> bytes:
        """POST JSON to a path. Raises EngineError."""
        return await self._request("POST", path, body, query)

    async def _request(self, method: str, path: str, body: Any, query: Mapping[str, str] | None) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                headers={SECRET_HEADER: self.secret, "Content-Type": "application/json"},
            )
        data = None if body is None else _encode(body)
        # the server drops a connection after an error inside it, which the next request on it would meet: only
        # generations, which are many, share connections
        headers = {} if path == _GENERATE else {"Connection": "close"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, params=query, headers=headers
            ) as response:
                content = await response.read()
                if response.status != 200:
                    raise EngineError(f"{self.name}: {method} {path}: {response.status} {_reason(content)}")
                return content
        except (TimeoutError, aiohttp.ClientError) as err:
            raise EngineError(f"{self.name}: {method} {path}: {type(err).__name__}: {err}") from err


def _reason(content: bytes) -> str:
    """The one line that says what went wrong in an error answer."""
    try:
        answer = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content[:300].decode(errors="replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]


def _sampling(spec: SamplingSpec) -> dict[str, Any]:
    plan = spec.interruption
    ends = {*spec.end_ids, *([] if plan is None else [plan.eos_id])}
    params: dict[str, Any] = WHOLE_DISTRIBUTION | {
        "max_tokens": spec.max_tokens if plan is None else min(spec.max_tokens, plan.max_tokens),
        "temperature": spec.temperature,
        "stop_token_ids": [] if spec.ignore_eos else sorted(ends),
        "seed": spec.seed,
        "logprobs": 0,
        "detokenize": False,
        "ignore_eos": spec.ignore_eos,
    }
    if plan is not None:
        params["extra_args"] = plan.to_extra_args()
    return params


def _rollout(choice: _Choice, spec: SamplingSpec) -> Rollout:
    tokens = choice.token_ids
    if choice.finish_reason not in ("stop", "length"):
        raise EngineError(f"completion ended with {choice.finish_reason!r} after {len(tokens)} tokens")
    assert choice.logprobs is not None and len(choice.logprobs.content) == len(tokens), "one log-prob a token"
    plan, truncated = spec.interruption, choice.finish_reason == "length"
    kept, mask, interrupted = len(tokens), (True,) * len(tokens), False
    if plan is not None:
        tags = tag(tokens, plan)
        kept, mask, interrupted = tags.kept_length, tags.loss_mask, tags.interrupted
        truncated |= tags.truncated
    return Rollout(
        token_ids=tuple(tokens[:kept]),
        rollout_logprobs=tuple(t.logprob if m else 0.0 for t, m in zip(choice.logprobs.content, mask)),
        policy_versions=_versions(choice.weight_versions, len(tokens))[:kept],
        loss_mask=mask,
        interrupted=interrupted,
        truncated=truncated,
        thinking_cut=plan.cut if plan else 0,
        seed=spec.seed,
        expert_choices=None if choice.routed_experts is None else _expert_choices(choice.routed_experts),
    )


def _expert_choices(encoded: str) -> ExpertChoices:
    """vLLM's array in .npy form, base64, [P + T - 1, L, K]. Raises EngineError for another."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except ValueError as err:
        raise EngineError(f"routed_experts: expected a base64 .npy array, found {err}") from None
    if array.ndim != 3 or array.dtype not in (np.uint8, np.uint16):
        raise EngineError(
            f"routed_experts: expected uint8 or uint16 [tokens, layers, experts], found {array.dtype} {array.shape}"
        )
    _, layers, topk = array.shape
    width: Literal[1, 2] = 1 if array.dtype == np.uint8 else 2
    return ExpertChoices(layers=layers, topk=topk, width=width, data=array.astype(f"<u{width}").tobytes())


def _versions(spans: list[_Span] | None, length: int) -> tuple[int, ...]:
    """[T] policy version of every token. Raises EngineError if a token has none."""
    versions: list[int] = []
    for span in spans or []:
        if not span.version.isdigit():
            raise EngineError(f"weights without a policy version: expected a number, found {span.version!r}")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != length:
        raise EngineError(f"policy versions: expected one for each of {length} tokens, found {len(versions)}")
    return tuple(versions)

"""Parses an engine's HTTP responses. Completions are parsed in decoder processes (`rollouts.decoder`).

A malformed response is the fault of the engine, which is evicted: EngineError. Sampled tokens without a
log-probability concern a single completion: CompletionLost.
"""

import io
from base64 import b64decode
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from megatron_scalerl.batching.rollout_bytes import RolloutArrays, narrowest
from megatron_scalerl.engine.interruption import Plan, tag
from megatron_scalerl.record import record
from megatron_scalerl.types import CompletionLost, ExpertChoices

T = TypeVar("T")

PROGRESS_PATH = "/msrl/progress"
"""HTTP path of the token counts of the engine's cores, which the middleware of `engine.vllm_plugin` reports."""
ADAPTER = "adapter"
"""Name of the policy's LoRA adapter in the engine, if weight updates contain only the adapter."""
REFUSED = "refused: "
"""Prefix of a worker's answer that says why the trainer's tensors do not fit the worker's model."""
MISSING_LOGPROB = -9999.0
"""vLLM's placeholder for a log-probability that is missing, NaN or -inf."""
NO_LOGPROBS = "no_logprobs"
"""`CompletionLost.reason` of a completion with a sampled token that has no usable log-probability."""
LARGEST_LOGPROB = 1e-3
"""The largest accepted log-probability (nats): 0, with room for rounding in float32."""
_VERSION_DIGITS = 18
"""Largest number of digits of a policy version, so that every version is below 2**63."""


class EngineError(RuntimeError):
    """An engine refused a request, failed while answering it, or sent a malformed response."""


class EngineLost(EngineError):
    """The engine was evicted while a request was in flight; the message names the engine and the reason."""


@record
class EngineInfo:
    """The configuration and the weights of an engine, as the engine's workers report them."""

    vocab_size: int
    """Number of logits per token, counted in logits that the engine computes for a test."""
    dtype: str
    """Configured type of the weights: float32 or bfloat16."""
    head_dtype: str
    """Precision of the projection to logits, float32 or bfloat16, measured on logits that are computed for a test."""
    logprobs_mode: str
    max_model_len: int
    """Largest number of tokens of prompt and completion together."""
    pid: int
    world_size: int
    """Number of workers: the product of tensor, pipeline and data parallelism."""
    weight_version: str
    """Label of the weights in use: a policy version as text."""
    weight_digests: tuple[str, ...]
    """For each worker, the digest of the bytes received in the last weight update; empty before any update."""
    attention_temperature: bool | None = None
    """Whether layers without RoPE scale queries by position; None if the policy has only layers with RoPE."""


@record
class CoreProgress:
    """The server's counts of tokens and requests for one engine core; each data-parallel rank has a core."""

    core: int
    """Data-parallel rank of the core."""
    tokens: int
    """Tokens that the core has produced since the server started, including tokens of aborted requests."""
    waiting: int
    """Number of requests of the core that have no token yet: queued or in prefill."""
    decoding: int
    """Number of unfinished requests of the core that have at least one token."""


@record
class EngineProgress:
    """The server's counts for all cores of an engine. The cores are not asked, so a hanging core delays no report."""

    cores: tuple[CoreProgress, ...]
    dead: bool
    """True if the server has noticed that a core exited."""

    @property
    def tokens(self) -> int:
        """Tokens that all cores have produced since the server started."""
        return sum(core.tokens for core in self.cores)


class _Token(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Token] | None] | None = None


def decode(content: bytes, kind: type[T], source: str) -> T:
    """Decode JSON into an object of type `kind`. Raises EngineError if the content is no JSON of this type.

    source: engine and path, for the message.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise EngineError(f"{source}: the answer is not valid: {content[:80]!r} ({ascii(str(err))[1:-1]})") from None


def convert(value: Any, kind: type[T], source: str) -> T:
    """Convert decoded JSON to type `kind`, or raise EngineError. source: engine and path, for the message."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as err:
        raise EngineError(
            f"{source}: the answer is not a valid {kind.__name__}: {str(value)[:200]} ({err})"
        ) from None


def completion(content: bytes, *, plan: Plan | None, seed: int, source: str) -> RolloutArrays:
    """The completion in the response to a generation request.

    plan: the request's interruption plan, None for a request without a plan. seed: the request's sampling seed.
    source: engine and path, for the message. Raises EngineError for a malformed response, and CompletionLost
    (`no_logprobs`) if a sampled token has no log-probability.
    """
    answer = decode(content, _Answer, source)
    if len(answer.choices) != 1:
        raise EngineError(f"{source}: the answer has {len(answer.choices)} completions instead of one")
    return arrays_of(answer.choices[0], plan=plan, seed=seed, source=source)


def prompt_logprobs(content: bytes, token_ids: Sequence[int], source: str) -> tuple[float, ...]:
    """[T - 1] the log-probs (nats) of token_ids[1:], from a response to a scoring request; EngineError if malformed.

    token_ids: [T] the prompt. source: engine and path, for the message.
    """
    rows = decode(content, _Answer, source).prompt_logprobs or []
    if len(rows) != len(token_ids):
        raise EngineError(
            f"{source}: the prompt has {len(token_ids)} tokens, but the answer has {len(rows)} log-probs"
        )
    tokens = [(row or {}).get(str(token), _Token()) for row, token in zip(rows[1:], token_ids[1:])]
    values = _values(tokens)
    if (index := _first_unusable(values)) is not None:
        raise EngineError(f"{source}: prompt token {index + 1}: {_unusable(tokens[index])}")
    return tuple(values.tolist())


def arrays_of(choice: _Choice, *, plan: Plan | None, seed: int, source: str) -> RolloutArrays:
    """The completion in a choice of a response. `completion` explains the arguments, and raises the same errors."""
    tokens = np.array(choice.token_ids, dtype=np.uint32)
    length = kept_length = len(tokens)
    if choice.finish_reason not in ("stop", "length"):
        raise EngineError(f"{source}: the completion ended with {choice.finish_reason!r} after {length} tokens")
    logprobs = [] if choice.logprobs is None else choice.logprobs.content
    if not length or len(logprobs) != length:
        raise EngineError(
            f"{source}: the completion has {length} tokens and {len(logprobs)} log-probs; each token needs a log-prob"
        )
    truncated = choice.finish_reason == "length"
    mask = np.ones(length, dtype=bool)
    interrupted = False
    cut = 0
    if plan is not None:
        try:
            tags = tag(tokens, plan)
        except ValueError as err:
            raise EngineError(f"{source}: {err}") from None
        kept_length = tags.kept_length
        mask = tags.loss_mask
        interrupted = tags.interrupted
        truncated |= tags.truncated
        cut = plan.cut
    values = np.where(mask, _values(logprobs[:kept_length]), 0.0)
    if (index := _first_unusable(values)) is not None:
        raise CompletionLost(f"{source}: token {index}: {_unusable(logprobs[index])}", reason=NO_LOGPROBS)
    experts = None
    if choice.routed_experts is not None:
        experts = _expert_choices(choice.routed_experts, source)
    return RolloutArrays(
        token_ids=tokens[:kept_length],
        rollout_logprobs=narrowest(values),
        policy_versions=_versions(choice.weight_versions, length, source)[:kept_length],
        loss_mask=mask,
        interrupted=interrupted,
        truncated=truncated,
        thinking_cut=cut,
        seed=seed,
        expert_choices=experts,
    )


def _values(tokens: Sequence[_Token]) -> np.ndarray:
    """[T] float64 the log-probs of the tokens, NaN for a missing log-prob."""
    return np.array([token.logprob for token in tokens], dtype=np.float64)  # numpy turns None into NaN


def _first_unusable(values: np.ndarray) -> int | None:
    """Index of the first of `values` [T] that is no valid log-probability; None if all are valid."""
    usable = (values > MISSING_LOGPROB) & (values <= LARGEST_LOGPROB)  # NaN fails both comparisons
    return None if usable.all() else int(np.argmin(usable))


def _unusable(token: _Token) -> str:
    return f"{token.logprob} is not a log-probability above {MISSING_LOGPROB:g} and at most 0"


def _expert_choices(encoded: str, source: str) -> ExpertChoices:
    """Decode expert choices: vLLM sends a base64 .npy array [P + T - 1 tokens, L layers, K experts per token].

    P and T are the numbers of tokens of prompt and completion. Raises EngineError if the text is no such array.
    """
    try:
        array = np.lib.format.read_array(io.BytesIO(b64decode(encoded, validate=True)), allow_pickle=False)
    except Exception as err:
        # The header of a .npy array is a Python literal; numpy raises errors of many types for a broken literal.
        reason = f"{type(err).__name__}: {str(err)[:200]}"
        raise EngineError(f"{source}: routed_experts: the text is not a base64 .npy array ({reason})") from None
    if array.ndim != 3 or array.dtype not in (np.uint8, np.uint16):
        raise EngineError(
            f"{source}: routed_experts: {array.dtype} {array.shape} is not uint8 or uint16 [tokens, layers, experts]"
        )
    _, layers, topk = array.shape
    width: Literal[1, 2] = 1 if array.dtype == np.uint8 else 2
    # The bytes are little-endian on every host, since the rollout store and further processes get the bytes.
    return ExpertChoices(layers=layers, topk=topk, width=width, data=array.astype(f"<u{width}").tobytes())


def _versions(spans: list[_Span] | None, length: int, source: str) -> np.ndarray:
    """[T] int64 policy version of each token. Raises EngineError if the spans do not cover all tokens in order."""
    versions = np.empty(length, dtype=np.int64)
    end = 0
    for span in spans or []:
        label = span.version
        if not (label.isascii() and label.isdecimal() and len(label) <= _VERSION_DIGITS):
            raise EngineError(
                f"{source}: policy version: {label[:80]!r} is not a number of at most {_VERSION_DIGITS} digits"
            )
        if span.start != end or not span.start < span.end <= length:
            raise EngineError(
                f"{source}: policy versions: tokens {span.start} to {span.end} are no span that begins at token "
                f"{end} and ends at or before token {length}"
            )
        if end and int(label) < versions[end - 1]:
            raise EngineError(
                f"{source}: policy versions: token {end} has {label}, older than {versions[end - 1]} before it"
            )
        versions[end : span.end] = int(label)
        end = span.end
    if end != length:
        raise EngineError(f"{source}: policy versions: only {end} of {length} tokens have a version")
    return versions

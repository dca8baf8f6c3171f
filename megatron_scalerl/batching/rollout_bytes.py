"""The bytes of a completion, in which it is stored (`rollouts.store`) and sent to the trainer's ranks.

Little-endian, without padding:

    header           format 1, flags, T, number of version runs, number of forced ranges, cut, seed, experts
    version runs     [V] (version i64, tokens u32): consecutive tokens of one policy version
    forced ranges    [F] (start u32, end u32): consecutive forced tokens
    token ids        [T] u32
    log-probs        [T] f32; f64 if a value is not exactly representable in f32
    expert choices   [P + T - 1, L, K] u8 or u16, if there are any

That is 8 bytes a token without expert choices, and 52 bytes for the rest in a completion of one version. Both
directions are exact: `rollout_of(read(write(rollout))) == rollout`.
"""

import struct
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from megatron_scalerl.types import Completion, ExpertChoices, Int64, Rollout

_FORMAT = 1
_HEADER = struct.Struct("<BBHIIIiIIHHQ")
"""format, flags, unused, T, V, F, thinking_cut, seed, layers, topk, width, bytes of expert choices."""
_INTERRUPTED = 1
_TRUNCATED = 2
_FLOAT64 = 4
_EXPERTS = 8
_VERSION_RUN = np.dtype([("version", "<i8"), ("tokens", "<u4")])
_FORCED_RANGE = np.dtype([("start", "<u4"), ("end", "<u4")])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutArrays:
    """The fields of `types.Rollout` as numpy arrays, read-only where they are views of stored bytes."""

    token_ids: np.ndarray
    """[T] uint32 ids of the completion's tokens."""
    rollout_logprobs: np.ndarray
    """[T] float32, or float64 if float32 would round."""
    policy_versions: np.ndarray
    """[T] int64 version that produced each token."""
    loss_mask: np.ndarray
    """[T] bool, False for a forced token."""
    interrupted: bool
    truncated: bool
    thinking_cut: int
    seed: int
    expert_choices: ExpertChoices | None = None


def arrays_of(rollout: Rollout) -> RolloutArrays:
    """The arrays of a rollout."""
    return RolloutArrays(
        token_ids=np.asarray(rollout.token_ids, "<u4"),
        rollout_logprobs=narrowest(np.asarray(rollout.rollout_logprobs, "<f8")),
        policy_versions=np.asarray(rollout.policy_versions, np.int64),
        loss_mask=np.asarray(rollout.loss_mask, bool),
        interrupted=rollout.interrupted,
        truncated=rollout.truncated,
        thinking_cut=rollout.thinking_cut,
        seed=rollout.seed,
        expert_choices=rollout.expert_choices,
    )


def narrowest(values: np.ndarray) -> np.ndarray:
    """`values` [T] float64 as float32, unless that would round one of them."""
    narrow = values.astype("<f4")
    if np.array_equal(narrow.astype("<f8"), values):
        return narrow
    return values


def rollout_of(arrays: RolloutArrays) -> Rollout:
    """The rollout of these arrays."""
    return Rollout(
        token_ids=tuple(arrays.token_ids.tolist()),
        rollout_logprobs=tuple(arrays.rollout_logprobs.tolist()),
        policy_versions=tuple(arrays.policy_versions.tolist()),
        loss_mask=tuple(arrays.loss_mask.tolist()),
        interrupted=arrays.interrupted,
        truncated=arrays.truncated,
        thinking_cut=arrays.thinking_cut,
        seed=arrays.seed,
        expert_choices=arrays.expert_choices,
    )


def facts_of(arrays: RolloutArrays) -> Completion:
    """The facts about a completion of at least one token."""
    return Completion(
        tokens=len(arrays.token_ids),
        sampled_tokens=int(arrays.loss_mask.sum()),
        first_version=int(arrays.policy_versions[0]),
        last_version=int(arrays.policy_versions[-1]),
        interrupted=arrays.interrupted,
        truncated=arrays.truncated,
        logprob_sum=float(arrays.rollout_logprobs[arrays.loss_mask].sum(dtype=np.float64)),
    )


def write(rollout: Rollout | RolloutArrays) -> bytes:
    """The bytes of one completion."""
    if isinstance(rollout, Rollout):
        rollout = arrays_of(rollout)
    flags = 0
    if rollout.interrupted:
        flags |= _INTERRUPTED
    if rollout.truncated:
        flags |= _TRUNCATED
    logprob_type = "<f4"
    if rollout.rollout_logprobs.dtype.itemsize == 8:
        flags |= _FLOAT64
        logprob_type = "<f8"
    expert_shape = (0, 0, 0)
    expert_bytes = b""
    experts = rollout.expert_choices
    if experts is not None:
        flags |= _EXPERTS
        expert_shape = (experts.layers, experts.topk, experts.width)
        expert_bytes = experts.data
    versions = _version_runs(rollout.policy_versions)
    forced = _forced_ranges(rollout.loss_mask)
    header = _HEADER.pack(
        _FORMAT,
        flags,
        0,
        len(rollout.token_ids),
        len(versions),
        len(forced),
        rollout.thinking_cut,
        rollout.seed,
        *expert_shape,
        len(expert_bytes),
    )
    logprobs = rollout.rollout_logprobs.astype(logprob_type)
    arrays = (versions, forced, rollout.token_ids.astype("<u4"), logprobs)
    return b"".join([header, *(array.tobytes() for array in arrays), expert_bytes])


def read(data: bytes | memoryview) -> RolloutArrays:
    """The completion in `data`; its token ids and log-probs are views of it. Raises ValueError for other bytes."""
    if len(data) < _HEADER.size:
        raise ValueError(f"rollout: {len(data)} bytes are shorter than a header of {_HEADER.size}")
    fields = _HEADER.unpack_from(data)
    layout, flags, unused, tokens, runs, ranges, cut, seed, layers, topk, width, expert_bytes = fields
    if layout != _FORMAT or flags >= 16 or unused:
        raise ValueError(
            f"rollout: format {layout} with flags {flags}, {unused} cannot be read; this is format {_FORMAT}"
        )
    value: np.dtype[Any] = np.dtype("<f4")
    if flags & _FLOAT64:
        value = np.dtype("<f8")
    sizes = [runs * _VERSION_RUN.itemsize, ranges * _FORCED_RANGE.itemsize, tokens * 4, tokens * value.itemsize]
    starts = np.cumsum([_HEADER.size, *sizes, expert_bytes]).tolist()
    # The counts are not trusted: nothing is allocated from them before they agree with the bytes received.
    if starts[-1] != len(data):
        raise ValueError(f"rollout: {len(data)} bytes arrived, the header says {starts[-1]}")
    version_runs = np.frombuffer(data, _VERSION_RUN, runs, starts[0])
    forced = np.frombuffer(data, _FORCED_RANGE, ranges, starts[1])
    lengths = version_runs["tokens"].astype(np.int64)
    if lengths.sum() != tokens or (lengths == 0).any():
        raise ValueError(
            f"rollout: runs of policy versions have to fill {tokens} tokens, theirs are {lengths.tolist()[:8]}"
        )
    choices = None
    if flags & _EXPERTS:
        if width not in (1, 2) or not layers or not topk or expert_bytes % (width * layers * topk):
            raise ValueError(
                f"rollout: {expert_bytes} bytes are no expert choices of {layers} x {topk} x {width} bytes"
            )
        choices = ExpertChoices(
            layers=layers, topk=topk, width=cast(Literal[1, 2], width), data=bytes(data[starts[4] :])
        )
    elif expert_bytes:
        raise ValueError(f"rollout: it has {expert_bytes} bytes of expert choices, but no flag for them")
    # Views where the bytes are the numbers; versions and mask are stored as runs and have to be spread.
    return RolloutArrays(
        token_ids=np.frombuffer(data, "<u4", tokens, starts[2]),
        rollout_logprobs=np.frombuffer(data, value, tokens, starts[3]),
        policy_versions=np.repeat(version_runs["version"].astype(np.int64), lengths),
        loss_mask=_mask(forced, tokens),
        interrupted=bool(flags & _INTERRUPTED),
        truncated=bool(flags & _TRUNCATED),
        thinking_cut=cut,
        seed=seed,
        expert_choices=choices,
    )


def _version_runs(versions: Int64[np.ndarray, " T"]) -> np.ndarray:
    """[V] runs of consecutive tokens with equal versions."""
    if not len(versions):
        return np.zeros(0, _VERSION_RUN)
    edges = np.flatnonzero(np.diff(versions)) + 1
    starts = np.concatenate([[0], edges])
    runs = np.zeros(len(starts), _VERSION_RUN)
    runs["version"] = versions[starts]
    runs["tokens"] = np.diff(np.append(starts, len(versions)))
    return runs


def _forced_ranges(mask: np.ndarray) -> np.ndarray:
    """[F] ranges in which `mask` [T] is False."""
    # Between two sampled tokens at the ends, each range has an edge down and one up.
    edges = np.flatnonzero(np.diff(np.concatenate([[True], mask, [True]]).astype(np.int8)))
    ranges = np.zeros(len(edges) // 2, _FORCED_RANGE)
    ranges["start"] = edges[::2]
    ranges["end"] = edges[1::2]
    return ranges


def _mask(forced: np.ndarray, tokens: int) -> np.ndarray:
    """[T] loss mask: True outside the forced ranges. Raises ValueError unless they ascend within the completion."""
    # start, end, start, end ...: if these rise, no range is empty and no two overlap.
    bounds = np.stack([forced["start"], forced["end"]], axis=1).ravel().astype(np.int64)
    if len(bounds) and (bounds[-1] > tokens or (np.diff(bounds) <= 0).any()):
        raise ValueError(
            f"rollout: forced ranges have to ascend within {tokens} tokens, these are {bounds.tolist()[:8]}"
        )
    mask = np.ones(tokens, bool)
    for start, end in bounds.reshape(-1, 2).tolist():
        mask[start:end] = False
    return mask

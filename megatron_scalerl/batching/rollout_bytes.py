"""The byte format in which a completion is stored (`rollouts.store`) and sent to the trainer's ranks.

Little-endian, without padding:

    header           format 1, flags, number of environment ranges, of tokens, of version runs, of forced ranges, cut,
                     seed, experts
    version runs     [V] (version i64, tokens u32): consecutive tokens of one policy version
    forced ranges    [F] (start u32, end u32): consecutive tokens that were not sampled
    environment      [E] (start u32, end u32): the forced ranges that the environment wrote
    token ids        [T] u32
    log-probs        [T] f32; f64 if a value is not exactly representable in f32
    expert choices   [P + T - 1, L, K] u8 or u16, if there are any
    columns          if flagged: number of columns u8; each column's name (length u8, ASCII); then [T] f32 a column

A token takes 8 bytes without expert choices; header and runs take 52 bytes in a completion of one version. Both
directions are exact: `rollout_of(read(write(rollout))) == rollout`.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, cast

import numpy as np

from megatron_scalerl.types import Completion, ExpertChoices, Int64, Part, Rollout

_FORMAT = 1
_HEADER = struct.Struct("<BBHIIIiIIHHQ")
"""The header's fields: format, flags, E, T, V, F (the lengths in the module's docstring), thinking_cut, seed, layers,
topk, width, and number of bytes of expert choices."""
_INTERRUPTED = 1
_TRUNCATED = 2
_FLOAT64 = 4
_EXPERTS = 8
_COLUMNS = 16
_VERSION_RUN = np.dtype([("version", "<i8"), ("tokens", "<u4")])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutArrays:
    """The fields of `types.Rollout` as numpy arrays. Arrays that are views of stored bytes are read-only."""

    token_ids: np.ndarray
    """[T] uint32 ids of the completion's tokens."""
    rollout_logprobs: np.ndarray
    """[T] float32, or float64 if float32 would round."""
    policy_versions: np.ndarray
    """[T] int64 version that produced each token."""
    loss_mask: np.ndarray
    """[T] bool, True for a sampled token."""
    interrupted: bool
    truncated: bool
    thinking_cut: int
    seed: int
    expert_choices: ExpertChoices | None = None
    environment: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[E, 2] int64 ranges [start, end) of tokens that the environment wrote."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> [T] float32 value of each token, from the run's algorithm (`ScaleRL.columns`)."""


def arrays_of(rollout: Rollout) -> RolloutArrays:
    """The fields of `rollout` as arrays. The rollout has no columns."""
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
        environment=np.array(rollout.environment, np.int64).reshape(-1, 2),
    )


def narrowest(values: np.ndarray) -> np.ndarray:
    """`values` [T] float64 as float32, or unchanged if float32 would round a value."""
    narrow = values.astype("<f4")
    if np.array_equal(narrow.astype("<f8"), values):
        return narrow
    return values


def rollout_of(arrays: RolloutArrays) -> Rollout:
    """The `Rollout` with the values of `arrays`, without columns."""
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
        environment=tuple(map(tuple, arrays.environment.tolist())),
    )


def facts_of(arrays: RolloutArrays) -> Completion:
    """The `Completion` of one rollout, which has at least one token: lengths, versions and sums, and not the
    tokens."""
    # The list has the numbers start, end, start, end ... of the policy's ranges. A range is empty
    # where a sample begins with the environment's history, or ends with the environment's message.
    edges = [0, *arrays.environment.ravel().tolist(), len(arrays.token_ids)]
    return Completion(
        tokens=len(arrays.token_ids),
        sampled_tokens=int(arrays.loss_mask.sum()),
        first_version=int(arrays.policy_versions[0]),
        last_version=int(arrays.policy_versions[-1]),
        interrupted=arrays.interrupted,
        truncated=arrays.truncated,
        logprob_sum=float(arrays.rollout_logprobs[arrays.loss_mask].sum(dtype=np.float64)),
        turns=sum(bool(arrays.loss_mask[start:end].any()) for start, end in zip(edges[::2], edges[1::2])),
        environment_tokens=int(np.diff(arrays.environment).sum()),
    )


def turn_numbers(samples: Sequence[RolloutArrays]) -> list[np.ndarray]:
    """For each sample, [T] the number of the policy's turn to which each token belongs, from 0; -1 for the
    environment's tokens.

    samples: the samples of an episode of `reset` and `step`, in order.
    """
    numbers = []
    earlier_turns = 0
    for sample in samples:
        policy = _mask(sample.environment, len(sample.token_ids))
        turns = np.cumsum(np.diff(policy, prepend=False) & policy)
        numbers.append(np.where(policy, earlier_turns + turns - 1, -1))
        earlier_turns += int(turns[-1])
    return numbers


def joined_parts(parts: Sequence[RolloutArrays]) -> RolloutArrays:
    """The samples of an episode that forked, concatenated without expert choices; a single sample is unchanged."""
    if len(parts) == 1:
        return parts[0]
    starts = accumulate((len(part.token_ids) for part in parts), initial=0)
    by_token = ("token_ids", "rollout_logprobs", "policy_versions", "loss_mask")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in by_token}
    names = parts[0].columns
    arrays["columns"] = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return replace(
        parts[0],
        **arrays,
        interrupted=any(part.interrupted for part in parts),
        truncated=parts[-1].truncated,
        expert_choices=None,
        environment=np.concatenate([part.environment + start for part, start in zip(parts, starts)]),
    )


def facts_of_parts(parts: Sequence[RolloutArrays], prompt_tokens: Sequence[int | None] = ()) -> Completion:
    """The `Completion` of an episode; first and last version are the lowest and highest of sampled tokens.

    parts: a single part, or the samples into which the episode forked. prompt_tokens: `types.Part.prompt_tokens` of
    each part; default: all of the prompt.
    """
    episode = joined_parts(parts)
    versions = episode.policy_versions[episode.loss_mask]
    # Parts may have been sampled at the same time, so the lowest version may be in any part.
    facts = replace(facts_of(episode), first_version=int(versions.min()), last_version=int(versions.max()))
    if len(parts) == 1 and not any(prompt_tokens):
        return facts
    samples = [
        Part(tokens=len(part.token_ids), sampled_tokens=int(part.loss_mask.sum()), prompt_tokens=size)
        for part, size in zip(parts, prompt_tokens or [None] * len(parts))
    ]
    turns = sum(facts_of(part).turns for part in parts)
    return replace(facts, turns=turns, parts=tuple(samples))


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
    columns = b""
    if rollout.columns:
        flags |= _COLUMNS
        columns = _column_bytes(rollout.columns)
    versions = _version_runs(rollout.policy_versions)
    forced = _forced_ranges(rollout.loss_mask)
    header = _HEADER.pack(
        _FORMAT,
        flags,
        len(rollout.environment),
        len(rollout.token_ids),
        len(versions),
        len(forced),
        rollout.thinking_cut,
        rollout.seed,
        *expert_shape,
        len(expert_bytes),
    )
    logprobs = rollout.rollout_logprobs.astype(logprob_type)
    environment = rollout.environment.astype("<u4")
    arrays = (versions, forced, environment, rollout.token_ids.astype("<u4"), logprobs)
    return b"".join([header, *(array.tobytes() for array in arrays), expert_bytes, columns])


def read(data: bytes | memoryview) -> RolloutArrays:
    """The completion in `data`, with token ids and log-probs as views. Raises ValueError for malformed bytes."""
    if len(data) < _HEADER.size:
        raise ValueError(f"rollout: {len(data)} bytes are too few: the header alone has {_HEADER.size}")
    fields = _HEADER.unpack_from(data)
    layout, flags, environment_ranges, tokens, runs, ranges, cut, seed, layers, topk, width, expert_bytes = fields
    if layout != _FORMAT or flags >= 32:
        raise ValueError(f"rollout: format {layout} with flags {flags} is unknown; format {_FORMAT} is read here")
    value: np.dtype[Any] = np.dtype("<f4")
    if flags & _FLOAT64:
        value = np.dtype("<f8")
    sizes = [runs * _VERSION_RUN.itemsize, ranges * 8, environment_ranges * 8, tokens * 4, tokens * value.itemsize]
    starts = np.cumsum([_HEADER.size, *sizes, expert_bytes]).tolist()
    # The counts in the header may be damaged: no array is made before counts and received bytes agree.
    columns = {}
    if flags & _COLUMNS:
        columns = _columns(data, starts[-1], tokens)
    elif starts[-1] != len(data):
        raise ValueError(f"rollout: {len(data)} bytes arrived, but the header announces {starts[-1]}")
    version_runs = np.frombuffer(data, _VERSION_RUN, runs, starts[0])
    mask = _mask(_ranges(data, ranges, starts[1], tokens), tokens)
    environment = _ranges(data, environment_ranges, starts[2], tokens)
    if (mask & ~_mask(environment, tokens)).any():
        raise ValueError(f"rollout: the loss mask has tokens that the environment wrote: {environment.tolist()[:4]}")
    lengths = version_runs["tokens"].astype(np.int64)
    if lengths.sum() != tokens or (lengths == 0).any():
        raise ValueError(
            f"rollout: runs of policy versions have {lengths.tolist()[:8]} tokens, but have to fill {tokens}"
        )
    choices = None
    if flags & _EXPERTS:
        if width not in (1, 2) or not layers or not topk or expert_bytes % (width * layers * topk):
            raise ValueError(
                f"rollout: {expert_bytes} bytes of expert choices, no multiple of {layers} x {topk} x {width} bytes"
            )
        choices = ExpertChoices(
            layers=layers, topk=topk, width=cast(Literal[1, 2], width), data=bytes(data[starts[5] : starts[6]])
        )
    elif expert_bytes:
        raise ValueError(f"rollout: {expert_bytes} bytes of expert choices came without the flag for expert choices")
    # Token ids and log-probs are views of `data`. Versions and mask are stored as runs, so each run is expanded to a
    # value for each token.
    return RolloutArrays(
        token_ids=np.frombuffer(data, "<u4", tokens, starts[3]),
        rollout_logprobs=np.frombuffer(data, value, tokens, starts[4]),
        policy_versions=np.repeat(version_runs["version"].astype(np.int64), lengths),
        loss_mask=mask,
        interrupted=bool(flags & _INTERRUPTED),
        truncated=bool(flags & _TRUNCATED),
        thinking_cut=cut,
        seed=seed,
        expert_choices=choices,
        environment=environment,
        columns=columns,
    )


def _column_bytes(columns: Mapping[str, np.ndarray]) -> bytes:
    names = b"".join(bytes([len(name)]) + name.encode("ascii") for name in columns)
    values = [column.astype("<f4").tobytes() for column in columns.values()]
    return b"".join([bytes([len(columns)]), names, *values])


def _columns(data: bytes | memoryview, start: int, tokens: int) -> dict[str, np.ndarray]:
    """Name -> [T] float32 column, read from byte `start` to the end. Raises ValueError for malformed bytes."""
    section = bytes(data[start:])
    names = []
    offset = 1
    for _ in range(section[0] if section else 0):
        end = offset + 1 + section[offset] if offset < len(section) else len(section) + 1
        names.append(section[offset + 1 : end])
        offset = end
    expected = offset + 4 * tokens * len(names)
    if not names or len({*names}) != len(names) or len(section) != expected or not b"".join(names).isascii():
        raise ValueError(
            f"rollout: {len(section)} bytes do not fit columns of {tokens} tokens with the names {names[:4]}"
        )
    values = np.frombuffer(section, "<f4", offset=offset).reshape(len(names), tokens)
    return {name.decode(): column for name, column in zip(names, values)}


def _version_runs(versions: Int64[np.ndarray, " T"]) -> np.ndarray:
    """[V] records (version, number of tokens), one for each run of consecutive tokens with equal versions."""
    if not len(versions):
        return np.zeros(0, _VERSION_RUN)
    edges = np.flatnonzero(np.diff(versions)) + 1
    starts = np.concatenate([[0], edges])
    runs = np.zeros(len(starts), _VERSION_RUN)
    runs["version"] = versions[starts]
    runs["tokens"] = np.diff(np.append(starts, len(versions)))
    return runs


def _forced_ranges(mask: np.ndarray) -> np.ndarray:
    """[F, 2] uint32 ranges in which `mask` [T] is False."""
    # With a sampled token added at both ends, each range begins where the mask changes to False and ends where it
    # changes to True.
    edges = np.flatnonzero(np.diff(np.concatenate([[True], mask, [True]]).astype(np.int8)))
    return edges.astype("<u4").reshape(-1, 2)


def _ranges(data: bytes | memoryview, count: int, offset: int, tokens: int) -> Int64[np.ndarray, "count 2"]:
    """[count, 2] ranges [start, end) at byte `offset`. Raises ValueError unless the numbers ascend up to `tokens`."""
    # The numbers are start, end, start, end ... If they rise, no range is empty and no two ranges overlap.
    bounds = np.frombuffer(data, "<u4", 2 * count, offset).astype(np.int64)
    if len(bounds) and (bounds[-1] > tokens or (np.diff(bounds) <= 0).any()):
        raise ValueError(f"rollout: the ranges {bounds.tolist()[:8]} do not ascend within {tokens} tokens")
    return bounds.reshape(-1, 2)


def _mask(ranges: Int64[np.ndarray, "count 2"], tokens: int) -> np.ndarray:
    """[T] bool, False for tokens within the ranges and True elsewhere."""
    mask = np.ones(tokens, bool)
    for start, end in ranges.tolist():
        mask[start:end] = False
    return mask

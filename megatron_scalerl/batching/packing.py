"""Packing samples into micro-batches, one `Batch` for each data-parallel rank.

Every rank gets the same number of micro-batches: expert and pipeline parallel ranks run collectives in each
micro-batch, and one too few would hang them. Weights are computed before packing, so the assignment of samples to
micro-batches changes neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from megatron_scalerl.shapes import Int32, Int64
from megatron_scalerl.types import Batch, MicroBatch, Rollout, Sample

_FILLS = {"staleness": -1, "expert_choices": -1}
"""Values of padding positions that are not 0."""
_COLUMNS = tuple(f.name for f in fields(MicroBatch) if f.name not in ("position_ids", "cu_seqlens"))


def pack(
    samples: Sequence[Sample],
    *,
    step: int,
    dp_size: int,
    micro_batch_tokens: int,
    pad_multiple: int,
    policy_version: int,
) -> list[Batch]:
    """One `Batch` per data-parallel rank, balanced by tokens; together they hold every sample exactly once.

    Samples are assigned, longest first, to the rank with the fewest tokens, and on each rank first-fit to
    micro-batches of at most `micro_batch_tokens`; each is then padded to a multiple of `pad_multiple` (and may exceed
    the limit by less than that multiple). Ranks with fewer micro-batches get fillers of zero weight. `policy_version`
    is that of the weights to train; a token's staleness is its distance from the version that sampled it.

    Raises ValueError if a sample alone is longer than `micro_batch_tokens`.
    """
    assert samples, "a step needs at least one sample"
    lengths = [len(s.prompt_token_ids) + len(s.rollout.token_ids) for s in samples]
    for index, length in enumerate(lengths):
        if length > micro_batch_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens: expected at least {length}, the length of sample {index}, "
                f"found {micro_batch_tokens}"
            )
    ranks: list[list[list[int]]] = []
    for members in _balance(lengths, dp_size):
        ranks.append(_first_fit(members, lengths, micro_batch_tokens))
    count = max(len(bins) for bins in ranks)
    filler = filler_micro_batch(pad_multiple)
    batches = []
    for bins in ranks:
        packed = [_micro_batch([samples[i] for i in b], pad_multiple, policy_version) for b in bins]
        batches.append(Batch(step=step, micro_batches=tuple(packed + [filler] * (count - len(packed)))))
    return batches


def _balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample numbers of each rank, longest first, each given to the rank with the fewest tokens so far."""
    members: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        members[rank].append(index)
        loads[rank] += lengths[index]
    return members


def _first_fit(members: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """`members` in bins of at most `capacity` tokens. Longest first, so similar lengths share a bin."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in members:
        chosen = next((b for b, room in enumerate(free) if room >= lengths[index]), len(bins))
        if chosen == len(bins):
            bins.append([])
            free.append(capacity)
        bins[chosen].append(index)
        free[chosen] -= lengths[index]
    return bins


def _micro_batch(samples: Sequence[Sample], pad_multiple: int, policy_version: int) -> MicroBatch:
    """The samples in one row, padded with a sequence of zero weight to a multiple of `pad_multiple`."""
    packed = [_sequence(sample, policy_version) for sample in samples]
    sizes = [len(columns["tokens"]) for columns in packed]
    joined = {key: np.concatenate([columns[key] for columns in packed]) for key in packed[0]}
    joined |= _joined_choices(samples)
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    micro_batch = MicroBatch(cu_seqlens=cu_seqlens, **joined)
    total = sum(sizes)
    return pad_to(micro_batch, -(-total // pad_multiple) * pad_multiple)


def _sequence(sample: Sample, policy_version: int) -> dict[str, np.ndarray]:
    """One completion as the arrays of a micro-batch: position i describes the token that it predicts."""
    rollout = sample.rollout
    prompt, size = len(sample.prompt_token_ids), len(sample.prompt_token_ids) + len(rollout.token_ids)
    assert prompt > 0, "a completion without a prompt has no position that predicts its first token"
    tokens = np.asarray(sample.prompt_token_ids + rollout.token_ids, dtype=np.int64)
    predicts = slice(prompt - 1, size - 1)  # the positions whose target is a completion token
    mask = np.zeros(size, dtype=bool)
    mask[predicts] = rollout.loss_mask
    logprobs = np.zeros(size, dtype=np.float32)
    logprobs[predicts] = rollout.rollout_logprobs
    staleness = np.full(size, -1, dtype=np.int32)
    staleness[predicts] = policy_version - np.asarray(rollout.policy_versions, dtype=np.int32)
    return {
        "tokens": tokens,
        "position_ids": np.arange(size, dtype=np.int64),
        "targets": np.append(tokens[1:], 0),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, logprobs, np.float32(0)),
        "advantages": np.full(size, sample.advantage, dtype=np.float32),
        "token_weights": np.where(mask, np.float32(sample.token_weight), np.float32(0)),
        "staleness": np.where(mask, staleness, np.int32(-1)),
    }


def _joined_choices(samples: Sequence[Sample]) -> dict[str, Int32[np.ndarray, "N L K"]]:
    """Experts of the concatenated samples, -1 for a sample without; empty if all are without."""
    known = [s.rollout.expert_choices for s in samples if s.rollout.expert_choices is not None]
    if not known:
        return {}
    layers, topk = known[0].layers, known[0].topk
    assert all((c.layers, c.topk) == (layers, topk) for c in known), "one policy, one number of layers and experts"
    parts = []
    for sample in samples:
        tokens = len(sample.prompt_token_ids) + len(sample.rollout.token_ids)
        part = np.full((tokens, layers, topk), -1, dtype=np.int32)
        choices = sample.rollout.expert_choices
        if choices is not None:
            numbers = np.frombuffer(choices.data, dtype=f"<u{choices.width}").reshape(-1, layers, topk)
            part[: min(tokens, len(numbers))] = numbers[:tokens]
        parts.append(part)
    return {"expert_choices": np.concatenate(parts)}


def pad_to(micro_batch: MicroBatch, size: int) -> MicroBatch:
    """`micro_batch` with a sequence of zero weight at its end, so that it has `size` positions."""
    missing = size - len(micro_batch.tokens)
    assert missing >= 0, (size, len(micro_batch.tokens))
    if missing == 0:
        return micro_batch
    columns = {}
    for key in _COLUMNS:
        array = getattr(micro_batch, key)
        if array is not None:
            fill = np.full((missing, *array.shape[1:]), _FILLS.get(key, 0), dtype=array.dtype)
            columns[key] = np.concatenate([array, fill])
    return replace(
        micro_batch,
        position_ids=np.concatenate([micro_batch.position_ids, np.arange(missing, dtype=np.int64)]),
        cu_seqlens=np.append(micro_batch.cu_seqlens, np.int32(size)),
        **columns,
    )


def filler_micro_batch(size: int) -> MicroBatch:
    """A micro-batch of one sequence of `size` tokens and zero weight: it is computed and contributes nothing."""
    empty = MicroBatch(
        tokens=np.zeros(0, dtype=np.int64),
        position_ids=np.zeros(0, dtype=np.int64),
        cu_seqlens=np.zeros(1, dtype=np.int32),
        targets=np.zeros(0, dtype=np.int64),
        loss_mask=np.zeros(0, dtype=bool),
        rollout_logprobs=np.zeros(0, dtype=np.float32),
        advantages=np.zeros(0, dtype=np.float32),
        token_weights=np.zeros(0, dtype=np.float32),
        staleness=np.zeros(0, dtype=np.int32),
    )
    return pad_to(empty, size)


def scoring_micro_batches(
    token_ids: Sequence[Sequence[int]], *, micro_batch_tokens: int, pad_multiple: int
) -> list[MicroBatch]:
    """Token lists in order, packed for scoring: the loss mask marks every position that has a target.

    Weights and advantages are 0. A list longer than `micro_batch_tokens` gets a micro-batch of its own.
    """
    rows: list[list[Sample]] = []
    used = 0
    for ids in token_ids:
        assert len(ids) >= 2, "a single token has nothing that predicts it"
        if not rows or used + len(ids) > micro_batch_tokens:
            rows.append([])
            used = 0
        rows[-1].append(_unweighted(tuple(ids)))
        used += len(ids)
    return [_micro_batch(row, pad_multiple, 0) for row in rows]


def _unweighted(ids: tuple[int, ...]) -> Sample:
    size = len(ids) - 1
    rollout = Rollout(
        token_ids=ids[1:],
        rollout_logprobs=(0.0,) * size,
        policy_versions=(0,) * size,
        loss_mask=(True,) * size,
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )
    return Sample(prompt_token_ids=ids[:1], rollout=rollout, advantage=0.0, token_weight=0.0)


def sequence_ids(micro_batch: MicroBatch) -> Int64[np.ndarray, " N"]:
    """Number of each position's sequence, from 0."""
    return np.repeat(np.arange(len(micro_batch.cu_seqlens) - 1), np.diff(micro_batch.cu_seqlens))


def real_tokens(batch: Batch) -> int:
    """Tokens of all sequences with loss, prompts included, without padding and fillers."""
    total = 0
    for micro_batch in batch.micro_batches:
        sizes = np.diff(micro_batch.cu_seqlens)
        with_loss = np.add.reduceat(micro_batch.loss_mask, micro_batch.cu_seqlens[:-1], dtype=np.int64) > 0
        total += int(sizes[with_loss].sum())
    return total

"""Builds micro-batches: the `Batch` of a data-parallel rank from the `RankPlan` and the completions.

The trainer's ranks call `build` (`trainer.batch_frames`). The warm start, benchmarks and tests call `pack`, which
assigns and builds in one process.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice

import numpy as np

from megatron_scalerl.batching.assignment import RankPlan, SampleFacts, plan_step, sample_facts
from megatron_scalerl.batching.rollout_bytes import RolloutArrays, arrays_of
from megatron_scalerl.types import Batch, Int32, Int64, MicroBatch, Sample

_FILLS = {"staleness": -1, "expert_choices": -1}
"""Field of `MicroBatch` -> value at padding positions; every field that is not listed has 0 there."""
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
    """The batches of all data-parallel ranks: `plan_step` assigns the samples, and `build` makes the arrays.

    Raises ValueError if a sample alone is longer than `micro_batch_tokens`.
    """
    plan = plan_step(
        [sample_facts(sample) for sample in samples],
        step=step,
        dp_size=dp_size,
        micro_batch_tokens=micro_batch_tokens,
        policy_version=policy_version,
    )
    batches = []
    for rank, numbers in zip(plan.ranks, plan.numbers):
        completions = [arrays_of(samples[i].rollout) for i in numbers]
        batches.append(build(rank, completions, pad_multiple=pad_multiple))
    return batches


def build(
    plan: RankPlan, completions: Sequence[RolloutArrays], *, pad_multiple: int, columns: Sequence[str] = ()
) -> Batch:
    """The `Batch` of the plan's rank.

    completions: of `plan.samples`, in the same order. columns: names of the algorithm's columns (`ScaleRL.columns`).
    Each micro-batch is padded to a multiple of `pad_multiple` tokens, and so may exceed `micro_batch_tokens` by less
    than `pad_multiple`. An empty micro-batch (filler) has `pad_multiple` tokens. The arrays own the memory and are
    writable. Raises ValueError for a completion that lacks a column.
    """
    assert len(completions) == len(plan.samples), (len(completions), len(plan.samples))
    arrays_left = iter(completions)
    rows = []
    for members in plan.micro_batches:
        arrays = list(islice(arrays_left, len(members)))
        rows.append(_micro_batch(members, arrays, pad_multiple, plan.policy_version, columns))
    return Batch(step=plan.step, micro_batches=tuple(rows))


def _micro_batch(
    samples: Sequence[SampleFacts],
    completions: Sequence[RolloutArrays],
    pad_multiple: int,
    policy_version: int,
    columns: Sequence[str] = (),
) -> MicroBatch:
    """The samples packed into one row, padded with a sequence of zero weight to a multiple of `pad_multiple`.

    Without samples the micro-batch is a filler.
    """
    if not samples:
        return filler_micro_batch(pad_multiple)
    packed = [
        _sequence(sample, arrays, policy_version, columns)
        for sample, arrays in zip(samples, completions, strict=True)
    ]
    sizes = [len(arrays["tokens"]) for arrays in packed]
    columns_by_key = {key: np.concatenate([arrays[key] for arrays in packed]) for key in packed[0]}
    columns_by_key |= _joined_choices(sizes, completions)
    # Transformer Engine's attention kernels take sequence starts as int32.
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    micro_batch = MicroBatch(cu_seqlens=cu_seqlens, **columns_by_key)
    total = sum(sizes)
    return pad_to(micro_batch, -(-total // pad_multiple) * pad_multiple)


def _sequence(
    sample: SampleFacts, completion: RolloutArrays, policy_version: int, columns: Sequence[str]
) -> dict[str, np.ndarray]:
    """The arrays of a micro-batch for one completion: position i describes the token that the position predicts."""
    prompt = len(sample.prompt_token_ids)
    size = sample.length
    assert prompt > 0, "the prompt is empty, so no position predicts the completion's first token"
    tokens = np.empty(size, np.int64)
    tokens[:prompt] = sample.prompt_token_ids
    tokens[prompt:] = completion.token_ids
    # The last position of the prompt predicts the first token of the completion. The last position predicts nothing.
    predicts = slice(prompt - 1, size - 1)
    mask = np.zeros(size, bool)
    mask[predicts] = completion.loss_mask
    logprobs = np.zeros(size, np.float32)
    logprobs[predicts] = completion.rollout_logprobs
    staleness = np.full(size, -1, np.int32)
    staleness[predicts] = policy_version - completion.policy_versions
    advantages = np.zeros(size, np.float32)
    if isinstance(sample.advantage, tuple):
        advantages[predicts] = sample.advantage
    else:
        advantages[:] = sample.advantage
    column_values = np.zeros((size, len(columns)), np.float32)
    for number, name in enumerate(columns):
        if name not in completion.columns:
            raise ValueError(
                f"a completion lacks column {name!r}: the group was stored before the column existed; start a new run"
            )
        column_values[predicts, number] = np.where(completion.loss_mask, completion.columns[name], np.float32(0))
    # Off the mask every array but `advantages` has a neutral value. The last position predicts nothing: its target is
    # 0.
    row = {
        "tokens": tokens,
        "position_ids": np.arange(size, dtype=np.int64),
        "targets": np.append(tokens[1:], 0),
        "loss_mask": mask,
        "rollout_logprobs": np.where(mask, logprobs, np.float32(0)),
        "advantages": advantages,
        "token_weights": np.where(mask, np.float32(sample.token_weight), np.float32(0)),
        "staleness": np.where(mask, staleness, np.int32(-1)),
    }
    if columns:
        row["columns"] = column_values
    return row


def _joined_choices(
    sizes: Sequence[int], completions: Sequence[RolloutArrays]
) -> dict[str, Int32[np.ndarray, "N L K"]]:
    """{"expert_choices": [N, L, K] experts of the packed sequences}; {} if no sequence has expert choices.

    The value is -1 where a sequence has no expert choices, and at the last token of every sequence.
    """
    shapes = {(c.expert_choices.layers, c.expert_choices.topk) for c in completions if c.expert_choices is not None}
    if not shapes:
        return {}
    assert len(shapes) == 1, f"expert choices differ in layers or experts per token: {shapes}"
    layers, topk = shapes.pop()
    parts = []
    for tokens, completion in zip(sizes, completions, strict=True):
        part = np.full((tokens, layers, topk), -1, np.int32)
        choices = completion.expert_choices
        if choices is not None:
            numbers = np.frombuffer(choices.data, dtype=f"<u{choices.width}").reshape(-1, layers, topk)
            # No layer of the engine has processed the last token: the last position keeps -1, and the trainer's
            # router chooses experts.
            part[: len(numbers)] = numbers[:tokens]
        parts.append(part)
    return {"expert_choices": np.concatenate(parts)}


def pad_to(micro_batch: MicroBatch, size: int) -> MicroBatch:
    """`micro_batch` with `size` positions: a sequence of zero weight is added at the end."""
    # Padding is a separate sequence, so that no real token attends to padding and the last sequence keeps its length.
    missing_positions = size - len(micro_batch.tokens)
    assert missing_positions >= 0, (size, len(micro_batch.tokens))
    if missing_positions == 0:
        return micro_batch
    columns = {}
    for key in _COLUMNS:
        array = getattr(micro_batch, key)
        if array is not None:
            fill = np.full((missing_positions, *array.shape[1:]), _FILLS.get(key, 0), array.dtype)
            columns[key] = np.concatenate([array, fill])
    return replace(
        micro_batch,
        position_ids=np.concatenate([micro_batch.position_ids, np.arange(missing_positions, dtype=np.int64)]),
        cu_seqlens=np.append(micro_batch.cu_seqlens, np.int32(size)),
        **columns,
    )


def filler_micro_batch(size: int) -> MicroBatch:
    """A micro-batch of one sequence of `size` tokens and zero weight, which is computed and contributes nothing."""
    empty = MicroBatch(
        tokens=np.zeros(0, np.int64),
        position_ids=np.zeros(0, np.int64),
        cu_seqlens=np.zeros(1, np.int32),
        targets=np.zeros(0, np.int64),
        loss_mask=np.zeros(0, bool),
        rollout_logprobs=np.zeros(0, np.float32),
        advantages=np.zeros(0, np.float32),
        token_weights=np.zeros(0, np.float32),
        staleness=np.zeros(0, np.int32),
    )
    return pad_to(empty, size)


def scoring_micro_batches(
    token_ids: Sequence[Sequence[int]], *, micro_batch_tokens: int, pad_multiple: int
) -> list[MicroBatch]:
    """Micro-batches for scoring lists of tokens, in order: the loss mask is True at every position with a target.

    Weights and advantages are 0. A list longer than `micro_batch_tokens` gets a separate micro-batch.
    """
    rows: list[list[Sequence[int]]] = []
    used = 0
    for ids in token_ids:
        assert len(ids) >= 2, "a list of a single token has nothing to score: no position predicts the first token"
        if not rows or used + len(ids) > micro_batch_tokens:
            rows.append([])
            used = 0
        rows[-1].append(ids)
        used += len(ids)
    micro_batches = []
    for row in rows:
        # The first token takes the place of the prompt, and all later tokens form the completion: each is scored.
        facts = [
            SampleFacts(prompt_token_ids=tuple(ids[:1]), tokens=len(ids) - 1, advantage=0.0, token_weight=0.0)
            for ids in row
        ]
        completions = [_unsampled(ids) for ids in row]
        micro_batches.append(_micro_batch(facts, completions, pad_multiple, policy_version=0))
    return micro_batches


def _unsampled(ids: Sequence[int]) -> RolloutArrays:
    """A completion made of all given tokens but the first, for scoring: log-probs and versions are 0."""
    size = len(ids) - 1
    return RolloutArrays(
        token_ids=np.asarray(ids[1:], np.int64),
        rollout_logprobs=np.zeros(size, np.float32),
        policy_versions=np.zeros(size, np.int64),
        loss_mask=np.ones(size, bool),
        interrupted=False,
        truncated=False,
        thinking_cut=0,
        seed=0,
    )


def sequence_ids(micro_batch: MicroBatch) -> Int64[np.ndarray, " N"]:
    """[N] number of the sequence to which each position belongs, from 0."""
    return np.repeat(np.arange(len(micro_batch.cu_seqlens) - 1), np.diff(micro_batch.cu_seqlens))


def real_tokens(batch: Batch) -> int:
    """Number of tokens in the sequences that have a loss: prompts included, padding and fillers left out."""
    total = 0
    for micro_batch in batch.micro_batches:
        sizes = np.diff(micro_batch.cu_seqlens)
        # `reduceat` gives an empty span the value at the span's start, but no sequence is empty.
        with_loss = np.add.reduceat(micro_batch.loss_mask, micro_batch.cu_seqlens[:-1], dtype=np.int64) > 0
        total += int(sizes[with_loss].sum())
    return total

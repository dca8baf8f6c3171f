"""A batch as the trainer's ranks receive it, and the columns that must come of it, one position after the other."""

import numpy as np
from random_policy import plan_of

from megatron_scalerl.batching.rollout_bytes import write
from megatron_scalerl.trainer import messages

TYPES = {
    "tokens": np.int64,
    "position_ids": np.int64,
    "targets": np.int64,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "advantages": np.float32,
    "token_weights": np.float32,
    "staleness": np.int32,
}


def planned(samples, **options):
    """The plan of step 4 at version 3 for one data-parallel rank; `options` replace these."""
    return plan_of(samples, **{"step": 4, "micro_batch_tokens": 64} | options)


def frames_of(plan, samples, dp_rank=0):
    """The frames for one data-parallel rank."""
    return messages.batch_frames(plan.ranks[dp_rank], [write(samples[i].rollout) for i in plan.numbers[dp_rank]])


def columns(samples, size, policy_version):
    """What a micro-batch of these samples and `size` positions must hold, by the words of `types.MicroBatch`."""
    rows, starts, experts = [], [0], []
    shape = next(((c.layers, c.topk) for c in (s.rollout.expert_choices for s in samples) if c is not None), None)
    for s in samples:
        rows += positions(s, policy_version)
        starts.append(len(rows))
        experts += choices(s, shape) if shape else []
    padding = size - len(rows)
    rows += [(0, i, 0, False, 0.0, 0.0, 0.0, -1) for i in range(padding)]
    found = {name: np.array([row[i] for row in rows], dtype=kind) for i, (name, kind) in enumerate(TYPES.items())}
    found["cu_seqlens"] = np.array(starts + [size] * (padding > 0), dtype=np.int32)
    if shape:
        found["expert_choices"] = np.array(experts + [np.full(shape, -1)] * padding, dtype=np.int32)
    return found


def positions(s, policy_version):
    """The values of each position of a sample, in the order of TYPES."""
    prompt, r = len(s.prompt_token_ids), s.rollout
    ids, rows = s.prompt_token_ids + r.token_ids, []
    for i, token in enumerate(ids):
        t = i + 1 - prompt  # the completion's token that this position predicts
        loss = 0 <= t < len(r.token_ids) and r.loss_mask[t]
        target = ids[i + 1] if i + 1 < len(ids) else 0
        predicted = (
            (r.rollout_logprobs[t], s.token_weight, policy_version - r.policy_versions[t]) if loss else (0.0, 0.0, -1)
        )
        logprob, weight, staleness = predicted
        rows.append((token, i, target, loss, logprob, s.advantage, weight, staleness))
    return rows


def choices(s, shape):
    """The experts [L, K] of each position of a sample."""
    size, found = len(s.prompt_token_ids) + len(s.rollout.token_ids), []
    given = s.rollout.expert_choices
    if given is not None:
        found = list(np.frombuffer(given.data, f"<u{given.width}").reshape(-1, *shape).astype(np.int32))[:size]
    return found + [np.full(shape, -1)] * (size - len(found))


def same(micro_batch, expected):
    """Every bit and every type, in memory that the trainer may write to."""
    for name in micro_batch.__dataclass_fields__:
        found = getattr(micro_batch, name)
        if found is None:
            assert name not in expected
            continue
        assert found.dtype == expected[name].dtype and found.shape == expected[name].shape, name
        assert found.tobytes() == expected[name].tobytes(), name
        assert found.flags.writeable and found.flags.owndata, name

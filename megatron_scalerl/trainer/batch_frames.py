"""A rank's batch: received by one rank of each data-parallel rank, checked, shared with its peers, built.

The peers are the tensor, pipeline and context parallel ranks with the same data-parallel rank. Expert parallel ranks
are among the other data-parallel ranks, and train their own batches. Peers get the frames as they came, broadcast on
the trainer's device over Megatron's model-parallel group (tensor and pipeline), then over the context-parallel group.
A peer whose holding rank fails fails with it: its collective ends when the other process exits, or by the group's
time-out, and the controller ends all ranks at the first failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.batching.assignment import RankPlan, SampleFacts
from megatron_scalerl.batching.packing import build
from megatron_scalerl.batching.rollout_bytes import RolloutArrays, read
from megatron_scalerl.record import record
from megatron_scalerl.trainer.messages import Buffer, InvalidMessage, Prepare, decode_for_rank
from megatron_scalerl.types import Batch

if TYPE_CHECKING:  # without Megatron a stand-in rank starts in a second
    from megatron_scalerl.distributed.parallel import Parallel

_LARGEST_ID = 2**32
"""Token ids are below it in the completions' bytes; the vocabulary is checked later (`agreement.check_tokens`)."""

_LARGEST_VERSION = 2**31 - 1
"""Staleness is an int32 (`types.MicroBatch`)."""


@record
class Limits:
    """Limits of a batch, which a rank knows from its recipe and its policy."""

    micro_batch_tokens: int
    """Largest number of tokens of a micro-batch, padding excluded."""
    experts: tuple[int, int] | None
    """Layers and experts per token of the engine's choices; None for a dense policy."""


@record
class ReceivedBatch:
    """A valid batch in the form in which it was sent. Produced by `checked`."""

    frames: tuple[Buffer, ...]
    """The message and its completions; the memory of ZeroMQ, or of the buffer that a peer received."""
    plan: RankPlan
    completions: tuple[RolloutArrays, ...]
    """The completions of `plan.samples`, as views of the frames."""


def checked(frames: Sequence[Buffer], limits: Limits) -> ReceivedBatch:
    """The batch in the frames of a Prepare. Raises InvalidMessage, naming the step and the completion.

    Memory for the columns is allocated from lengths that agree with the bytes received, and not before.
    """
    message = decode_for_rank(frames)
    assert isinstance(message, Prepare), message
    plan = message.plan
    where = f"batch of step {plan.step}"
    if not 0 <= plan.policy_version <= _LARGEST_VERSION:
        raise InvalidMessage(
            f"{where}: the policy version is {plan.policy_version}; it has to be 0 to {_LARGEST_VERSION}"
        )
    for number, members in enumerate(plan.micro_batches):
        tokens = sum(sample.length for sample in members)
        if tokens > limits.micro_batch_tokens:
            raise InvalidMessage(
                f"{where}: micro-batch {number} has {tokens} tokens, more than the limit {limits.micro_batch_tokens}"
            )
    completions = []
    for number, (sample, frame) in enumerate(zip(plan.samples, frames[1:], strict=True)):
        try:
            completions.append(_completion(sample, frame, plan.policy_version, limits))
        except ValueError as error:
            raise InvalidMessage(f"{where}: completion {number}: {error}") from error
    return ReceivedBatch(frames=tuple(frames), plan=plan, completions=tuple(completions))


def _completion(sample: SampleFacts, frame: Buffer, policy_version: int, limits: Limits) -> RolloutArrays:
    """The completion in a frame. Raises ValueError where it is not that of the sample."""
    prompt = sample.prompt_token_ids
    if not prompt or min(prompt) < 0 or max(prompt) >= _LARGEST_ID:
        raise ValueError(
            f"the prompt has to be one or more token ids; it is {len(prompt)} numbers, {prompt[:4]} first"
        )
    completion = read(frame)
    if len(completion.token_ids) != sample.tokens:
        raise ValueError(f"{len(completion.token_ids)} tokens arrived, the plan says {sample.tokens}")
    versions = completion.policy_versions
    if len(versions) and not 0 <= versions.min() <= versions.max() <= policy_version:
        raise ValueError(
            f"its tokens have policy versions {versions.min()} to {versions.max()}, not all within 0 to "
            f"{policy_version}"
        )
    choices = completion.expert_choices
    if choices is not None and (choices.layers, choices.topk) != limits.experts:
        raise ValueError(
            f"its expert choices are of (layers, experts) {(choices.layers, choices.topk)}, the policy has "
            f"{limits.experts or 'none'}"
        )
    return completion


class BatchFrames:
    """The batch that a rank holds for its next step: at most one. Filled by `hold`, emptied by `take`."""

    def __init__(self, trainer: Any, parallel: Parallel):
        self._parallel = parallel
        self._limits = Limits(micro_batch_tokens=trainer.micro_batch_tokens, experts=trainer.experts)
        self._pad_multiple: int = trainer.pad_multiple
        self._columns: Sequence[str] = trainer.columns
        self._held: ReceivedBatch | None = None

    def hold(self, frames: Sequence[Buffer]) -> int:
        """Keep the batch in the frames of a Prepare; returns its step.

        Raises InvalidMessage as `checked` does, on a rank that gets its batches from a peer, and while it holds one.
        """
        batch = checked(frames, self._limits)
        if not self._parallel.holds_batch:
            raise InvalidMessage(f"batch of step {batch.plan.step}: this rank gets its batches from a peer")
        if self._held is not None:
            raise InvalidMessage(
                f"batch of step {batch.plan.step}: this rank still holds the batch of step {self._held.plan.step}"
            )
        self._held = batch
        return batch.plan.step

    def take(self, step: int) -> Batch:
        """The batch held by this rank or its peer, for which all these ranks must ask together.

        Raises InvalidMessage if no batch is held, or the batch of another step.
        """
        batch = self._held
        self._held = None
        sent = None
        if batch is not None:
            sent = batch.frames
            if batch.plan.step != step:
                raise InvalidMessage(f"step {step}: this rank holds the batch of step {batch.plan.step}")
        elif self._parallel.holds_batch:
            raise InvalidMessage(f"step {step}: this rank holds no batch")
        frames = shared(sent, self._parallel)
        if batch is None:
            # The frames came from a peer: this rank, too, checks what it builds from.
            batch = checked(frames, self._limits)
            if batch.plan.step != step:
                raise InvalidMessage(f"step {step}: the peer sent the batch of step {batch.plan.step}")
        return build(batch.plan, batch.completions, pad_multiple=self._pad_multiple, columns=self._columns)


def shared(frames: Sequence[Buffer] | None, parallel: Parallel) -> Sequence[Buffer]:
    """The frames of the holding rank on all its peers, which pass None. Collective.

    Without peers the frames are returned as they are.
    """
    model = parallel.groups.mp
    context = parallel.groups.cp
    if model.size() == context.size() == 1:
        assert frames is not None
        return frames
    # Megatron's model-parallel group has the tensor and pipeline ranks of one context-parallel rank: first the group
    # of the holding rank, then each of its members broadcasts to its context-parallel peers.
    sizes, payload = _joined(frames, parallel.device)
    if parallel.cp_rank == 0:
        sizes, payload = _broadcast(sizes, payload, model)
    sizes, payload = _broadcast(sizes, payload, context)
    if frames is not None:
        return frames
    whole = payload.cpu().numpy().data
    ends = np.cumsum(sizes.cpu().numpy())
    return [whole[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist())]


def _joined(frames: Sequence[Buffer] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """[F] int64 sizes of the frames, and their bytes one after the other; empty without frames."""
    sizes = torch.tensor([len(frame) for frame in frames or ()], dtype=torch.int64, device=device)
    payload = np.concatenate([np.frombuffer(frame, np.uint8) for frame in frames or (b"",)])
    return sizes, torch.from_numpy(payload).to(device)


def _broadcast(sizes: Tensor, payload: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The first rank's sizes and payload on all ranks of the group."""
    if group.size() == 1:
        return sizes, payload
    first = dist.get_global_rank(group, 0)
    lengths = torch.tensor([len(sizes), len(payload)], dtype=torch.int64, device=sizes.device)
    dist.broadcast(lengths, first, group=group)
    if group.rank() != 0:
        count, total = lengths.tolist()
        sizes = sizes.new_empty(count)
        payload = payload.new_empty(total)
    dist.broadcast(sizes, first, group=group)
    dist.broadcast(payload, first, group=group)
    return sizes, payload

"""The batch of a rank: how its frames are received, checked and shared with the rank's peers.

One rank of each data-parallel rank receives the frames. Its peers are the tensor-, pipeline- and context-parallel
ranks with the same data-parallel rank. Expert-parallel ranks belong to other data-parallel ranks, and train separate
batches. Peers get the received frames unchanged, broadcast on the trainer's device. The broadcast goes over
Megatron's model-parallel group (tensor and pipeline), and then over the context-parallel group. When a receiving rank
fails, the rank's peers fail too: a peer's collective ends when the receiving process exits, or by the group's
time-out, and the controller ends all ranks at the first failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_scalerl.batching.assignment import RankPlan
from megatron_scalerl.batching.packing import build
from megatron_scalerl.batching.rollout_bytes import RolloutArrays, read
from megatron_scalerl.record import record
from megatron_scalerl.trainer.messages import Buffer, InvalidMessage, Prepare, decode_for_rank
from megatron_scalerl.types import Batch

# Type checkers alone run this import: the tests' stand-in for a rank has to start without loading Megatron.
if TYPE_CHECKING:
    from megatron_scalerl.distributed.parallel import Parallel


@record
class ReceivedBatch:
    """A checked batch: the received frames, the plan, and the completions. Produced by `checked`."""

    frames: tuple[Buffer, ...]
    """Frames of the message and of the completions, in memory of ZeroMQ or in a peer's receive buffer."""
    plan: RankPlan
    completions: tuple[RolloutArrays, ...]
    """The completions of `plan.samples`, as views of the frames."""


def checked(frames: Sequence[Buffer]) -> ReceivedBatch:
    """The batch in the frames of a Prepare. Raises InvalidMessage if bytes and plan differ.

    Memory for the batch's columns is allocated only after the stated lengths agree with the received bytes.
    """
    message = decode_for_rank(frames)
    assert isinstance(message, Prepare), message
    plan = message.plan
    completions = []
    for number, (sample, frame) in enumerate(zip(plan.samples, frames[1:], strict=True)):
        place = f"batch of step {plan.step}: completion {number}"
        try:
            completion = read(frame)
        except ValueError as error:
            raise InvalidMessage(f"{place}: {error}") from error
        if len(completion.token_ids) != sample.tokens:
            raise InvalidMessage(
                f"{place}: {len(completion.token_ids)} tokens arrived, but the batch's plan has {sample.tokens}"
            )
        completions.append(completion)
    return ReceivedBatch(frames=tuple(frames), plan=plan, completions=tuple(completions))


class BatchFrames:
    """The batch that a rank holds for the next step, if any. `hold` stores the batch, and `take` removes it."""

    def __init__(self, parallel: Parallel, *, pad_multiple: int, columns: Sequence[str] = ()):
        """columns: names of the per-token columns that the run's algorithm adds (`ScaleRL.columns`)."""
        self._parallel = parallel
        self._pad_multiple = pad_multiple
        self._columns = columns
        self._held_batch: ReceivedBatch | None = None

    def hold(self, frames: Sequence[Buffer]) -> int:
        """Keep the batch in the frames of a Prepare, and return its step. Raises InvalidMessage as `checked` does."""
        assert self._parallel.holds_batch, "a Prepare came to a rank that gets its batches from a peer rank"
        assert self._held_batch is None, f"a Prepare came before step {self._held_batch.plan.step} took its batch"
        self._held_batch = checked(frames)
        return self._held_batch.plan.step

    def take(self, step: int) -> Batch:
        """Return the batch that this rank or a peer holds. The call is collective for the rank and its peers."""
        batch = self._held_batch
        self._held_batch = None
        if batch is None:
            assert not self._parallel.holds_batch, f"step {step}: this rank was sent no batch"
            # This rank decodes and checks the peer's frames as if the controller had sent the frames.
            batch = checked(shared(None, self._parallel))
        else:
            shared(batch.frames, self._parallel)
        assert batch.plan.step == step, f"step {step}: the prepared batch is of step {batch.plan.step}"
        return build(batch.plan, batch.completions, pad_multiple=self._pad_multiple, columns=self._columns)


def shared(frames: Sequence[Buffer] | None, parallel: Parallel) -> Sequence[Buffer]:
    """Broadcast the frames of the rank that holds the batch to the rank's peers, which pass None. Collective.

    Every rank gets the frames. Without peers the result is `frames` itself.
    """
    model = parallel.groups.mp
    context = parallel.groups.cp
    if model.size() == context.size() == 1:
        assert frames is not None
        return frames
    # Megatron's model-parallel group has the tensor and pipeline ranks of one context-parallel rank. So the holding
    # rank first broadcasts to its group, and then each member of the group to its context-parallel peers.
    sizes, payload = _sizes_and_bytes(frames, parallel.device)
    if parallel.cp_rank == 0:
        sizes, payload = _broadcast(sizes, payload, model)
    sizes, payload = _broadcast(sizes, payload, context)
    if frames is not None:
        return frames
    data = payload.cpu().numpy().data
    ends = np.cumsum(sizes.cpu().numpy())
    return [data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist())]


def _sizes_and_bytes(frames: Sequence[Buffer] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sizes [F] (int64) of the frames, and their concatenated bytes. Both are empty without frames."""
    sizes = torch.tensor([len(frame) for frame in frames or ()], dtype=torch.int64, device=device)
    payload = np.concatenate([np.frombuffer(frame, np.uint8) for frame in frames or (b"",)])
    return sizes, torch.from_numpy(payload).to(device)


def _broadcast(sizes: Tensor, payload: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Broadcast sizes and payload of the group's first rank. Returns both on every rank of the group."""
    if group.size() == 1:
        return sizes, payload
    first_rank = dist.get_global_rank(group, 0)
    lengths = torch.tensor([len(sizes), len(payload)], dtype=torch.int64, device=sizes.device)
    dist.broadcast(lengths, first_rank, group=group)
    if group.rank() != 0:
        count, total = lengths.tolist()
        sizes = sizes.new_empty(count)
        payload = payload.new_empty(total)
    dist.broadcast(sizes, first_rank, group=group)
    dist.broadcast(payload, first_rank, group=group)
    return sizes, payload

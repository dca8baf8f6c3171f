"""Messages between the controller and the trainer's ranks, in msgpack.

`distributed.sockets` has the connection, and the messages by which a rank joins. A message is one frame, except for
Prepare, which has further frames.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_scalerl.batching.assignment import RankPlan
from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.rendezvous import HostRendezvous, Rendezvous
from megatron_scalerl.distributed.sockets import (
    Buffer,
    InvalidMessage,
    Message,
    Ping,
    Refused,
    Welcome,
    decode,
    encode,
)
from megatron_scalerl.record import record
from megatron_scalerl.weights.plan import Connection, Needs


@record
class TrainerInfo:
    """Facts about the trainer. Produced once by the worker of rank 0."""

    dp_size: int
    """Data-parallel size, the number of batches per step."""
    parameters: int
    """Parameters of the policy, each counted once."""
    device: str
    """"cpu", or the name of the GPU."""
    backend: str
    """Library of the collectives: "gloo" or "nccl"."""
    logits: str
    """Precision of the logit projection: "fp32" or "model"."""


class Hello(sockets.Hello, frozen=True):
    """Rank to controller: the rank's first message."""

    rank: int
    world_size: int
    bound: HostRendezvous | None = None
    """Address at which rank 0 has bound the run's store. None for every other rank, and on one host."""


class Meet(Message, frozen=True):
    """Controller to rank: join the process group and build the trainer."""

    rendezvous: Rendezvous
    """Place where the ranks meet. On several hosts this is the address in rank 0's Hello, for which ranks wait."""


class Ready(Message, frozen=True):
    """Rank to controller: the trainer is built."""

    rank: int
    dp_rank: int
    holds_batch: bool
    """True for the one process of each data-parallel rank that receives the batches."""
    info: TrainerInfo


class BatchReceived(Message, frozen=True):
    """Rank to controller: the batch of this step has arrived, whole and valid."""

    rank: int
    step: int


class Done(Message, frozen=True):
    """Rank to controller: the command succeeded."""

    call: int
    """Number of the command that succeeded: `Command.call`."""
    rank: int
    value: msgspec.Raw
    """The result as msgpack, from rank 0; nil from every other rank."""


class Failed(Message, frozen=True):
    """Rank to controller: an exception has ended this rank, and the process will exit."""

    rank: int
    error: str
    """Last line of the exception's traceback."""
    full: str = ""
    """Path of the file that could not be written because the disk is full; empty for all other failures."""


class Prepare(Message, frozen=True):
    """Controller to rank: keep this batch until Step asks for it. Only ranks with `Ready.holds_batch` get batches.

    Answer: BatchReceived. The message is followed by one frame for each completion, in the order of `plan.samples`
    and in the encoding of `batching.rollout_bytes`.
    """

    plan: RankPlan
    sizes: tuple[int, ...]
    """Size of each completion's frame (bytes)."""


class Command(Message, frozen=True):
    """Controller to rank: an order to all ranks. Rank 0 answers with the result."""

    call: int
    """Number of the command, which `Done` repeats."""


class Step(Command, frozen=True):
    """Train on the batch that was prepared for this step. Answer: StepReport."""

    step: int


class DescribeWeights(Command, frozen=True):
    """List names, types and shapes of the weights. Answer: weights.plan.Manifest."""


class PlanWeights(Command, frozen=True):
    """Plan the weight updates of engine workers with these `needs`. Answer: weights.plan.WeightPlan."""

    needs: tuple[Needs, ...]
    """For each shard, the rectangles of each tensor that the shard's workers need."""


class ConnectWeights(Command, frozen=True):
    """Open the weight transport to the engines. Answer: the reason of a failure, or an empty text."""

    connection: Connection


class SendWeights(Command, frozen=True):
    """Send the current weights to the engines as a policy version. Answer: SendReport."""

    version: int


class ScoreTokens(Command, frozen=True):
    """Score token lists. Answer: log-probabilities and entropies (nats) of each list's tokens, except the first."""

    token_ids: list[list[int]]


class Save(Command, frozen=True):
    """Start to write a checkpoint. copied: write from a copy, because steps follow before FinishSave."""

    path: str
    extra: dict[str, Any]
    copied: bool


class FinishSave(Command, frozen=True):
    """Commit the checkpoint that Save started. Answer: seconds of writing, or nil if a rank still writes."""

    wait: bool


class Load(Command, frozen=True):
    """Read a checkpoint. Answer: the `extra` of the Save."""

    path: str


class Stop(Command, frozen=True):
    """Leave the process groups and exit with 0."""


ToRank = (
    Welcome
    | Meet
    | Ping
    | Refused
    | Prepare
    | Step
    | DescribeWeights
    | PlanWeights
    | ConnectWeights
    | SendWeights
    | ScoreTokens
    | Save
    | FinishSave
    | Load
    | Stop
)
ToController = Hello | Ready | BatchReceived | Done | Failed

_to_rank = msgspec.msgpack.Decoder(ToRank)
_to_controller = msgspec.msgpack.Decoder(ToController)


def batch_frames(plan: RankPlan, completions: Sequence[Buffer]) -> list[Buffer]:
    """The frames of a Prepare: the message, then the completions of `plan.samples` in order, not copied."""
    return [encode(Prepare(plan=plan, sizes=tuple(map(len, completions)))), *completions]


def decode_for_rank(frames: Sequence[Buffer]) -> ToRank:
    """Decode a message of the controller. Raises InvalidMessage for anything else.

    A Prepare is invalid if the number of completions differs from the plan, or their bytes differ from `sizes`.
    """
    if not frames:
        raise InvalidMessage("a message arrived without a frame")
    message: ToRank = decode(_to_rank, frames[:1])
    if isinstance(message, Prepare):
        _check_sizes(message, frames[1:])
    elif len(frames) != 1:
        raise InvalidMessage(f"the message has {len(frames)} frames, but only a Prepare may have more than one frame")
    return message


def _check_sizes(message: Prepare, completions: Sequence[Buffer]) -> None:
    place = f"batch of step {message.plan.step}"
    expected = len(message.plan.samples)
    if not len(message.sizes) == len(completions) == expected:
        raise InvalidMessage(
            f"{place}: {len(completions)} completions and {len(message.sizes)} sizes arrived for {expected} samples"
        )
    for number, (size, completion) in enumerate(zip(message.sizes, completions)):
        if len(completion) != size:
            raise InvalidMessage(f"{place}: completion {number} has {len(completion)} bytes instead of {size}")


def decode_for_controller(frames: Sequence[bytes]) -> ToController:
    """Decode a message of a rank, which has one frame. Raises InvalidMessage for anything else."""
    return decode(_to_controller, frames)

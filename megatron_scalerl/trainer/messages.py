"""Messages between the controller and the trainer's ranks, and their msgpack form.

The controller binds a ROUTER socket, every rank connects a DEALER; `sockets` encrypts both. A rank's first message
names the run and the incarnation that it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from megatron_scalerl.distributed.rendezvous import HostRendezvous, Rendezvous
from megatron_scalerl.types import Batch
from megatron_scalerl.weights.connection import Connection


@dataclass(frozen=True, kw_only=True)
class TrainerInfo:
    """Facts about the trainer. Produced once by the worker of rank 0."""

    world_size: int
    dp_size: int
    """Data-parallel size: batches per step."""
    parameters: int
    """Parameters of the policy, each counted once."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    device: str
    """For example "cpu" or a GPU's name."""
    backend: str
    """Collectives: gloo or nccl."""
    dtype: str
    """Type of weights and activations."""
    logits: str
    """Precision of the logit projection: fp32 or model."""
    pad_multiple: int
    """Lengths of micro-batches must be a multiple of it."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: first message."""

    rank: int
    world_size: int
    run_id: str
    incarnation: str
    bound: HostRendezvous | None = None
    """On several hosts, from rank 0: address of the run's store, which it has bound."""


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: accepted, wait for Meet."""


class Meet(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: join the process group and build the trainer."""

    rendezvous: Rendezvous
    """On several hosts the address in rank 0's Hello, for which the others wait."""


class Ping(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: no operation; sending it shows whether the rank is still connected."""


class Refused(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: exit, for this reason."""

    reason: str


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: the trainer is built."""

    rank: int
    dp_rank: int
    info: TrainerInfo


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: the command succeeded."""

    call: int
    """Number of the command."""
    rank: int
    value: msgspec.Raw
    """The result as msgpack, from rank 0; nil from the others."""


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: an exception ended this rank; the process exits next."""

    rank: int
    error: str
    """Last line of the traceback."""


class Step(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Train on a batch. Answer: StepReport."""

    call: int
    batch: Batch


class DescribeWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """List names, types and shapes of the weights. Answer: checkpoints.manifest.Manifest."""

    call: int


class ConnectWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Open the weight transport to the engines. Answer: why it failed, empty if it did not."""

    call: int
    connection: Connection


class SendWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Send all weights as a version. Answer: the sender's report."""

    call: int
    version: int


class Logprobs(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Score token lists. Answer: for each, log-probabilities (nats) of its tokens from the second on."""

    call: int
    token_ids: list[list[int]]


class Save(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Write a checkpoint."""

    call: int
    path: str
    extra: dict[str, Any]


class Load(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Read a checkpoint. Answer: its `extra`."""

    call: int
    path: str


class Stop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leave the process groups and exit with 0."""

    call: int


Command = Step | DescribeWeights | ConnectWeights | SendWeights | Logprobs | Save | Load | Stop
ToRank = Welcome | Meet | Ping | Refused | Command
ToController = Hello | Ready | Done | Failed


def _array_to_wire(value: Any) -> Any:
    """msgspec's hook: a numpy array as [dtype, shape, bytes]."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise TypeError(f"expected a numpy array, found {type(value).__name__}")


_DTYPE = re.compile(r"[<|][bfiu][1248]")
"""Little-endian numbers and booleans; numpy would parse more than that."""


def _array_from_wire(kind: type, value: Any) -> Any:
    """msgspec's hook: the array of `_array_to_wire`; it owns its memory and is writable."""
    if kind is np.ndarray:
        dtype, shape, data = value
        if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
            raise ValueError(f"expected a dtype of numbers, found {dtype!r}")
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
    raise TypeError(f"expected numpy.ndarray, found {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_wire)
_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_array_from_wire)
_to_controller = msgspec.msgpack.Decoder(ToController, dec_hook=_array_from_wire)


class InvalidMessage(RuntimeError):
    """Bytes that are not a message of this protocol: the peer is broken, or has another version."""


def encode(message: Any) -> bytes:
    """A message or a plain value as msgpack."""
    return _encoder.encode(message)


def decode_for_rank(data: bytes) -> ToRank:
    """A message of the controller. Raises InvalidMessage for anything else."""
    return _decoded(_to_rank, data)


def decode_for_controller(frames: Sequence[bytes]) -> ToController:
    """A message of a rank, in one frame. Raises InvalidMessage for anything else."""
    if len(frames) != 1:
        raise InvalidMessage(f"expected a message in one frame, found {len(frames)}")
    return _decoded(_to_controller, frames[0])


def decode_value(data: msgspec.Raw, kind: Any) -> Any:
    """The value of a Done. Raises InvalidMessage if it is not of type `kind`."""
    return _decoded(msgspec.msgpack.Decoder(kind, dec_hook=_array_from_wire), data)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(f"expected a message, found {len(bytes(data))} bytes that are none ({error})") from error

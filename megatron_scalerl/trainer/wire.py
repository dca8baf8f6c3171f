"""What controller and trainer ranks say to each other: messages, their msgpack form, keys, and sockets' options.

The controller binds a ROUTER socket, every rank connects a DEALER. Both sides encrypt with CURVE under a server
key that is derived from the run's secret: the server's public key is never sent, so a peer without the secret
cannot complete the handshake. Inside, a rank first says which run and incarnation it belongs to.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from megatron_scalerl.batch import from_wire, to_wire
from megatron_scalerl.types import Batch

HEARTBEAT_MS = 5_000
"""Interval of ZeroMQ's own heartbeats (milliseconds); its input/output thread sends them, also in a long step."""
HEARTBEAT_TIMEOUT_MS = 60_000
"""Silence after which a peer counts as gone (milliseconds). A closed connection is noticed at once."""
MAX_QUEUED = 16
"""Messages that may wait in a socket: one command is under way at a time, so two per rank would do."""


@dataclass(frozen=True, kw_only=True)
class TrainerInfo:
    """What the trainer is, asked once. Produced by the worker of rank 0."""

    world_size: int
    dp_size: int
    """Batches wanted per step."""
    parameters: int
    """Parameters of the policy, counted once however many ranks hold them."""
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
    """Every micro-batch's length is a multiple of it."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller, first message."""

    rank: int
    world_size: int
    run_id: str
    incarnation: str


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: go on and build the trainer."""


class Ping(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: nothing to do; sending it shows whether the rank is still connected."""


class Refused(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: exit, for this reason."""

    reason: str


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: the trainer is built."""

    rank: int
    dp_rank: int
    info: TrainerInfo


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: the command succeeded. Rank 0 carries the value."""

    call: int
    rank: int
    value: msgspec.Raw


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Rank to controller: an exception ended this rank; the process exits after it."""

    rank: int
    error: str
    """Last line of the traceback."""


class Step(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Train on a batch. Answer: StepReport."""

    call: int
    batch: Batch


class Manifest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Name the weights. Answer: weights.manifest.Manifest."""

    call: int


class ConnectWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Open the wire to the engines."""

    call: int
    spec: dict[str, Any]


class SendWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Send all weights under a version. Answer: the sender's report."""

    call: int
    version: int


class Logprobs(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Score token lists. Answer: for each, log-probabilities of its tokens from the second on."""

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


class ExportHf(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Write the policy as a Hugging Face folder."""

    call: int
    path: str


class Stop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leave the process groups and exit with 0."""

    call: int


Command = Step | Manifest | ConnectWeights | SendWeights | Logprobs | Save | Load | ExportHf | Stop
ToRank = Welcome | Ping | Refused | Command
ToController = Hello | Ready | Done | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=from_wire)
_to_controller = msgspec.msgpack.Decoder(ToController, dec_hook=from_wire)


def encode(message: Any) -> bytes:
    """A message or a plain value as msgpack."""
    return _encoder.encode(message)


def decode_for_rank(data: bytes) -> ToRank:
    """What the controller sent. Raises msgspec.ValidationError for anything else."""
    return _to_rank.decode(data)


def decode_for_controller(data: bytes) -> ToController:
    """What a rank sent. Raises msgspec.ValidationError for anything else."""
    return _to_controller.decode(data)


def secure_server(socket: zmq.Socket, secret: str) -> None:
    """Make `socket` the CURVE server of the run, with heartbeats; call before bind."""
    public, private = _server_keys(secret)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = public, private
    _keep_alive(socket)


def secure_client(socket: zmq.Socket, secret: str) -> None:
    """Make `socket` speak to the CURVE server of the run, with heartbeats; call before connect."""
    socket.curve_serverkey = _server_keys(secret)[0]
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    _keep_alive(socket)


def _server_keys(secret: str) -> tuple[bytes, bytes]:
    """Public and private key (Z85) of the run's server, the same for the same secret."""
    if not secret:
        raise ValueError("secret: expected a non-empty text, found an empty one")
    seed = hmac.new(secret.encode(), b"megatron_scalerl trainer socket", hashlib.sha256).digest()
    private = z85.encode(seed)
    return zmq.curve_public(private), private


def _keep_alive(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 2_000)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)

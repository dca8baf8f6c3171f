"""What controller and trainer ranks say to each other: messages, their msgpack form, keys, and sockets' options.

The controller binds a ROUTER socket, every rank connects a DEALER. Both sides encrypt with CURVE. Two key pairs are
derived from the run's secret, the controller's and the ranks': a rank goes on only with a server that holds the
first, the controller only with clients that hold the second, so that neither public key opens anything. CURVE's
short-term keys make a recorded conversation worthless, and the secret of an earlier start opens no later one.
Inside, a rank first says which run and incarnation it belongs to.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

from megatron_scalerl.batching.packing import from_wire, to_wire
from megatron_scalerl.distributed.rendezvous import HostRendezvous, Rendezvous
from megatron_scalerl.types import Batch
from megatron_scalerl.weights.connection import Connection

HEARTBEAT_MS = 5_000
"""Interval of ZeroMQ's own heartbeats (milliseconds); its input/output thread sends them, also in a long step."""
HEARTBEAT_TIMEOUT_MS = 60_000
"""Silence after which a peer counts as gone (milliseconds). A closed connection is noticed at once."""
MAX_QUEUED = 16
"""Messages that may wait in the controller's socket, per rank and direction: one command is under way at a time."""


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
    bound: HostRendezvous | None = None
    """On several hosts, from rank 0: where it has bound the store of the run."""


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: you are one of us, wait for Meet."""


class Meet(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to rank: meet the others there and build the trainer."""

    rendezvous: Rendezvous
    """On several hosts it is what rank 0's Hello said, and the others wait for that."""


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


class DescribeWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """List names, types and shapes of the weights. Answer: checkpoints.manifest.Manifest."""

    call: int


class ConnectWeights(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Open the wire to the engines."""

    call: int
    connection: Connection


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


class Stop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leave the process groups and exit with 0."""

    call: int


Command = Step | DescribeWeights | ConnectWeights | SendWeights | Logprobs | Save | Load | Stop
ToRank = Welcome | Meet | Ping | Refused | Command
ToController = Hello | Ready | Done | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=from_wire)
_to_controller = msgspec.msgpack.Decoder(ToController, dec_hook=from_wire)


_ZAP_DOMAIN = b"megatron_scalerl"
_CONTROLLER = b"megatron_scalerl trainer socket"
_RANKS = b"megatron_scalerl trainer ranks"


class InvalidMessage(RuntimeError):
    """Bytes that are no message of this protocol: the other side is broken, or another version."""


def encode(message: Any) -> bytes:
    """A message or a plain value as msgpack."""
    return _encoder.encode(message)


def decode_for_rank(data: bytes) -> ToRank:
    """What the controller sent. Raises InvalidMessage for anything else."""
    return _decoded(_to_rank, data)


def decode_for_controller(frames: Sequence[bytes]) -> ToController:
    """What a rank sent, in one frame. Raises InvalidMessage for anything else."""
    if len(frames) != 1:
        raise InvalidMessage(f"expected a message in one frame, found {len(frames)}")
    return _decoded(_to_controller, frames[0])


def decode_value(data: msgspec.Raw, kind: Any) -> Any:
    """The value of a Done. Raises InvalidMessage where it is not of that kind."""
    return _decoded(msgspec.msgpack.Decoder(kind, dec_hook=from_wire), data)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidMessage(f"expected a message, found {len(bytes(data))} bytes that are none ({error})") from error


class CurveAuthenticator(AsyncioAuthenticator):
    """Admits, to one context's server sockets, clients that hold the ranks' key; needs a running event loop.

    libzmq asks for every connection, and without somebody to ask, or to answer, refuses it.
    """

    def __init__(self, context: zmq.Context, secret: str) -> None:
        super().__init__(context)
        self._public = _keys(secret, _RANKS)[0]
        self.configure_curve_callback(_ZAP_DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key (Z85) is admitted."""
        return hmac.compare_digest(key, self._public)


def secure_server(socket: zmq.Socket, secret: str) -> None:
    """Make `socket` the CURVE server of the run, with heartbeats; call before bind.

    A CurveAuthenticator of its context must be running.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, _CONTROLLER)
    _keep_alive(socket)


def secure_client(socket: zmq.Socket, secret: str) -> None:
    """Make `socket` speak to the CURVE server of the run, with heartbeats; call before connect."""
    socket.curve_serverkey = _keys(secret, _CONTROLLER)[0]
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, _RANKS)
    _keep_alive(socket)
    # Pings of the controller, the only one who is heard here, wait until a step is done. A socket with a full queue
    # reads no heartbeats either and takes the controller for gone.
    socket.setsockopt(zmq.RCVHWM, 0)


def _keys(secret: str, whose: bytes) -> tuple[bytes, bytes]:
    """Public and private key (Z85) of one side, the same for the same secret."""
    if not secret:
        raise ValueError("secret: expected a non-empty text, found an empty one")
    private = z85.encode(hmac.new(secret.encode(), whose, hashlib.sha256).digest())
    return zmq.curve_public(private), private


def _keep_alive(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 2_000)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)

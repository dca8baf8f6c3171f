"""Encryption and liveness of the sockets between the controller and its peers (ZeroMQ's CURVE).

For each purpose, two key pairs are derived from the run's secret: the controller's and its peers'. A peer accepts
only a server that holds the first, the controller only clients that hold the second, so neither public key grants
access, and a peer of one purpose is refused by the socket of another. CURVE's ephemeral keys make a recorded session
useless, and every start of a run has a new secret.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
from collections.abc import Iterator

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85

HEARTBEAT_MS = 5_000
"""Interval of ZeroMQ's heartbeats (milliseconds). Its I/O thread sends them, also during a long step."""
HEARTBEAT_TIMEOUT_MS = 60_000
"""Silence after which a peer counts as disconnected (milliseconds). A closed connection is noticed at once."""
MAX_QUEUED = 16
"""Messages that may wait in the controller's socket, per peer and direction: there is one command at a time."""

_ZAP_DOMAIN = b"megatron_scalerl"


class Purpose(enum.StrEnum):
    """A socket of the controller; each has keys of its own."""

    TRAINER = "trainer"
    """Its peers are the trainer's ranks."""
    ENGINES = "engines"
    """Its peers are the agents of engines on other hosts."""


class Side(enum.StrEnum):
    """One end of a connection."""

    CONTROLLER = "controller"
    PEER = "peer"


class CurveAuthenticator(AsyncioAuthenticator):
    """Admits clients with the peers' key to the server sockets of one context; needs a running event loop.

    libzmq queries it for every connection, and refuses the connection without an answer.
    """

    def __init__(self, context: zmq.Context, secret: str, purpose: Purpose) -> None:
        super().__init__(context)
        self._public = _keys(secret, purpose, Side.PEER)[0]
        self.configure_curve_callback(_ZAP_DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key (Z85) is admitted."""
        return hmac.compare_digest(key, self._public)


def secure_server(socket: zmq.Socket, secret: str, purpose: Purpose) -> None:
    """Make `socket` the CURVE server of the run, with heartbeats; call before bind.

    Its context must have a running CurveAuthenticator. Raises ValueError for an empty secret.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, purpose, Side.CONTROLLER)
    _keep_alive(socket)


def secure_client(socket: zmq.Socket, secret: str, purpose: Purpose) -> None:
    """Make `socket` a CURVE client of the run, with heartbeats; call before connect.

    Raises ValueError for an empty secret.
    """
    socket.curve_serverkey = _keys(secret, purpose, Side.CONTROLLER)[0]
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, purpose, Side.PEER)
    _keep_alive(socket)
    # The controller is the only peer. Its pings wait until a step is done, and a socket with a full queue would not
    # read heartbeats either: it would take the controller for disconnected.
    socket.setsockopt(zmq.RCVHWM, 0)


def controller_key(secret: str, purpose: Purpose) -> str:
    """The controller's public key (hexadecimal), by which a peer knows the secret of one start of the controller."""
    return z85.decode(_keys(secret, purpose, Side.CONTROLLER)[0]).hex()


@contextlib.contextmanager
def ignore_disconnected() -> Iterator[None]:
    """Leaves the block if a message cannot be routed because its receiver is not connected."""
    try:
        yield
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise


def _keys(secret: str, purpose: Purpose, side: Side) -> tuple[bytes, bytes]:
    """Public and private key (Z85) of one side, the same for the same secret and purpose."""
    if not secret:
        raise ValueError("secret: expected a non-empty text, found an empty one")
    label = f"megatron_scalerl {purpose} {side}".encode()
    private = z85.encode(hmac.new(secret.encode(), label, hashlib.sha256).digest())
    return zmq.curve_public(private), private


def _keep_alive(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 2_000)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)

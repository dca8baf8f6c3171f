"""The protocol by which a process joins the controller: a trainer's rank, or the agent of an engine.

1. The peer connects a DEALER to the controller's ROUTER. CURVE proves to both ends that both know the secret.
2. The peer sends Hello: the run, the start of the controller, and the rank or engine.
3. The controller answers Welcome, or Refused with a reason: the peer exits. A wrong secret gets no answer.
4. Both send heartbeats. The controller detects a lost peer by a Ping that cannot be sent. A peer that loses the
   connection to the controller exits at once.
5. A peer that was told to stop, or that fails, reports this in a last message and exits after the delivery.

From the run's secret two key pairs are derived for each purpose (trainer, engines): the controller's and the peers'.
A peer accepts only a server with the controller's private key, and the controller only clients with the peers'
private key. So knowing a public key grants no access, and the socket for engines refuses trainer ranks and the
reverse. A recorded session is useless, since CURVE uses ephemeral keys, and every start of a run has a new secret.
Messages are msgpack of declared types.
"""

import contextlib
import enum
import hashlib
import hmac
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 5_000
"""Interval of ZeroMQ's heartbeats (ms). ZeroMQ's I/O thread sends heartbeats even during a long step. So a heartbeat
shows that a process is running, but not that the event loop is."""
HEARTBEAT_TIMEOUT_MS = 60_000
"""Time without heartbeats after which a peer counts as disconnected (ms). A closed connection is noticed at once."""
MAX_QUEUED = 16
"""Largest number of messages in the controller's queue per peer and direction. A peer gets one command at a time, so
few messages wait."""

GREETING_S = 60.0
"""Seconds within which the controller must answer a Hello."""
LEAVE_S = 10.0
"""Seconds that an exiting peer waits for the delivery of messages to the controller."""
EXIT_ORPHAN = 3
"""Exit code of a peer whose controller disconnected."""
EXIT_REFUSED = 4
"""Exit code of a peer that the controller refused, or that got no answer to Hello."""
LOCAL = "127.0.0.1"

_ZAP_DOMAIN = b"megatron_scalerl"

Buffer = bytes | memoryview


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base class of all messages. An encoded message has the name of the class as tag."""


class Hello(Message, frozen=True):
    """The first message, from peer to controller. Subclasses add a rank's number or an engine's name."""

    run_id: str
    incarnation: str
    """Name of the attempt (start of the controller) that started the peer, or that the peer wants to join."""

    def objection(self, run_id: str, incarnation: str) -> str | None:
        """Why the peer does not belong to the run and attempt of this controller; None if the peer does."""
        if self.run_id != run_id:
            return f"the process belongs to run {self.run_id}, and this controller to run {run_id}"
        if self.incarnation != incarnation:
            return f"the process belongs to incarnation {self.incarnation}, and this controller is {incarnation}"
        return None


class Welcome(Message, frozen=True):
    """Message from controller to peer: the peer is accepted."""


class Refused(Message, frozen=True):
    """Message from controller to peer: the peer is refused for this reason, and must exit."""

    reason: str


class Ping(Message, frozen=True):
    """Message from controller to peer that has no effect on the peer.

    If a Ping can be sent, the peer is still connected.
    """


class InvalidMessage(RuntimeError):
    """Received bytes are not a message of this protocol. The sender has a bug or another version of this package."""


class RefusedError(RuntimeError):
    """The controller refused this peer, did not answer, or gave up the peer later."""


encode = msgspec.msgpack.encode
"""Encode a message or a plain value as msgpack."""


def decode(decoder: msgspec.msgpack.Decoder[Any], frames: Sequence[Buffer | msgspec.Raw]) -> Any:
    """Decode a message of one frame. Raises InvalidMessage for several frames or invalid bytes."""
    if len(frames) != 1:
        raise InvalidMessage(f"a message has one frame, but {len(frames)} frames were received")
    try:
        return decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error may quote a part of the message, so unprintable characters are escaped and the text is cut.
        reason = ascii(str(error))[1:-1][:300]
        raise InvalidMessage(f"the {len(bytes(frames[0]))} bytes received are no valid message ({reason})") from error


class Purpose(enum.StrEnum):
    """Kind of the peers of one of the controller's sockets. Each purpose has key pairs of its own."""

    TRAINER = "trainer"
    """The peers are the trainer's ranks."""
    ENGINES = "engines"
    """The peers are the agents of engines on other hosts."""


class Side(enum.StrEnum):
    """One of the two ends of a connection."""

    CONTROLLER = "controller"
    PEER = "peer"


class CurveAuthenticator(AsyncioAuthenticator):
    """Admits clients that have the peers' key to the server sockets of a context. Needs a running event loop.

    libzmq asks the authenticator about every new connection, and refuses connections about which no answer comes.
    """

    def __init__(self, context: zmq.Context, secret: str, purpose: Purpose):
        super().__init__(context)
        self._public = _keys(secret, purpose, Side.PEER)[0]
        self.configure_curve_callback(_ZAP_DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether to admit a client with this public key (Z85)."""
        return hmac.compare_digest(key, self._public)


def secure_server(socket: zmq.Socket, secret: str, purpose: Purpose) -> None:
    """Make `socket` a CURVE server with the controller's keys and heartbeats. The caller must call this before bind.

    The socket's context must have a running CurveAuthenticator. Raises ValueError if the secret is empty.
    """
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, purpose, Side.CONTROLLER)
    _keep_alive(socket)


def secure_client(socket: zmq.Socket, secret: str, purpose: Purpose) -> None:
    """Make `socket` a CURVE client with the peers' keys and heartbeats. The caller must call this before connect.

    Raises ValueError if the secret is empty.
    """
    socket.curve_serverkey = _keys(secret, purpose, Side.CONTROLLER)[0]
    socket.curve_publickey, socket.curve_secretkey = _keys(secret, purpose, Side.PEER)
    _keep_alive(socket)
    # The receive queue has no limit: Pings of the controller fill the queue during a long step. With a full queue
    # ZeroMQ would read no heartbeats, and would count the controller as disconnected.
    socket.setsockopt(zmq.RCVHWM, 0)


def controller_key(secret: str, purpose: Purpose) -> str:
    """The controller's public key (hexadecimal). By this key a peer checks that a secret is the one of the controller
    which started the peer."""
    return z85.decode(_keys(secret, purpose, Side.CONTROLLER)[0]).hex()


def _keys(secret: str, purpose: Purpose, side: Side) -> tuple[bytes, bytes]:
    """Public and private key (Z85) of one side, derived from the secret. Equal arguments give equal keys."""
    if not secret:
        raise ValueError("secret: the run's secret is empty")
    label = f"megatron_scalerl {purpose} {side}".encode()
    private = z85.encode(hmac.new(secret.encode(), label, hashlib.sha256).digest())
    return zmq.curve_public(private), private


def _keep_alive(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 2_000)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)


class ControllerSocket:
    """The controller's end of the connections to all peers of one purpose. Needs a running event loop.

    The socket holds at most MAX_QUEUED messages per peer and direction in queues.
    """

    def __init__(self, secret: str, purpose: Purpose, *, address: str = LOCAL, longest: int = -1):
        """Create the socket and listen on a free port. Raises ValueError if `address` is not an address of this host.

        address: the address at which the socket listens. longest: largest size of a peer's message (bytes); -1 for no
        limit.
        """
        self._context = zmq.asyncio.Context()
        self.authenticator = CurveAuthenticator(self._context, secret, purpose)
        self.authenticator.start()
        self._socket = self._context.socket(zmq.ROUTER)
        # With this option a message to a lost peer raises EHOSTUNREACH. By default ZeroMQ drops the message silently.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, longest)
        self._socket.setsockopt(zmq.IPV6, int(":" in address))
        secure_server(self._socket, secret, purpose)
        host = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"--address: {address} is not an address of this host ({error})") from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._socket.closed

    async def poll(self, milliseconds: int) -> bool:
        """Wait at most this time for a message. True if a message has arrived."""
        return bool(await self._socket.poll(milliseconds))

    async def read(self) -> tuple[bytes, list[bytes]]:
        """Read one message; returns ZeroMQ's identity of the sender, and the message's frames."""
        sender, *frames = await self._socket.recv_multipart()
        return sender, frames

    async def send(self, peer: bytes, *frames: Buffer, wait: bool = True) -> bool:
        """Send a message without copying it; returns False if the peer is not connected.

        wait: True to wait for room in the peer's queue. With False, a message is dropped if the queue is full, and
        True is returned.
        """
        try:
            await self._socket.send_multipart([peer, *frames], flags=0 if wait else zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    async def connected(self, peer: bytes) -> bool:
        """Whether a peer is connected. Sends a Ping."""
        return await self.send(peer, encode(Ping()), wait=False)

    def close(self) -> None:
        """Close all connections. Peers that have not called `leave` then exit."""
        if not self._socket.closed:
            self.authenticator.stop()
            self._context.destroy(linger=0)


class ControllerLink:
    """A peer's end of the connection to the controller. A peer calls `greet`, `send` and `receive`, then `exit`."""

    def __init__(self, endpoint: str, secret: str, purpose: Purpose, decoded: Callable[[Sequence[Buffer]], Any]):
        """decoded: decodes the frames of a message from the controller; raises InvalidMessage for invalid frames."""
        self.endpoint = endpoint
        self._decoded = decoded
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        secure_client(self.socket, secret, purpose)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(endpoint)
        self._leaving = threading.Event()

    def greet(self, hello: Any, within_s: float) -> Any:
        """Send Hello and return the controller's answer. Raises RefusedError if refused or too late.

        After the answer a thread watches the connection. If the controller disconnects or sends no heartbeats, the
        thread ends this process with EXIT_ORPHAN.
        """
        self.send(hello)
        if not self.socket.poll(int(within_s * 1000)):
            raise RefusedError(
                f"the controller at {self.endpoint} did not answer within {within_s:g} s; "
                "the controller has exited, or MSRL_SECRET belongs to another run"
            )
        answer, _ = self.receive()
        threading.Thread(target=self._exit_on_disconnect, name="controller-watch", daemon=True).start()
        return answer

    def send(self, message: Any) -> None:
        """Queue a message to the controller."""
        self.socket.send(encode(message))

    def receive(self) -> tuple[Any, list[memoryview]]:
        """Wait for the next message that is no Ping. Returns the message and all frames (not copied).

        Raises InvalidMessage for invalid frames, and RefusedError if the message is Refused.
        """
        message = None
        while message is None:  # None stands for a Ping
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            message = self.understood(frames)
        return message, frames

    def understood(self, frames: Sequence[Buffer]) -> Any:
        """Decode a message; None for a Ping. Raises InvalidMessage for invalid frames, and RefusedError for
        Refused."""
        message = self._decoded(frames)
        if isinstance(message, Refused):
            raise RefusedError(f"the controller at {self.endpoint} refused this process: {message.reason}")
        if isinstance(message, Ping):
            return None
        return message

    def leave(self) -> None:
        """Stop exiting when the controller disconnects, because this process is about to exit."""
        self._leaving.set()

    def abandon(self) -> None:
        """Close the connection at once and drop unsent messages, because the controller has not answered."""
        self._context.destroy(linger=0)

    def exit(self, status: int) -> NoReturn:
        """End the process without Python's cleanup, once messages to the controller are delivered, or after LEAVE_S.

        In Python's cleanup, destructors of process groups would wait for peers inside a collective, and with NCCL for
        a GPU that may never answer. Threads of gloo groups would sometimes abort the process
        (`processes.child_process.end_with`).
        """
        self.leave()
        self.socket.close(linger=int(LEAVE_S * 1000))
        self._context.term()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _exit_on_disconnect(self) -> None:
        # This runs in a thread, because the main thread may compute for minutes without reading the socket. Before
        # the first handshake ZeroMQ tries a broken connection again, so the end of such a connection does not count.
        connected = False
        with contextlib.suppress(zmq.ContextTerminated):
            event = None
            while event != zmq.EVENT_DISCONNECTED or not connected:
                event = recv_monitor_message(self._monitor)["event"]
                connected = connected or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._leaving.is_set():
            self._monitor.close(linger=0)
            return
        logger.error("the controller at %s disconnected; this process exits", self.endpoint)
        os._exit(EXIT_ORPHAN)

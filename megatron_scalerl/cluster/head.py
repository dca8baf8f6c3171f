"""What the head of several nodes offers to the others, and their checks of it: a shared file, and a port."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.cluster.check import Check, failed, ok, skipped
from megatron_scalerl.distributed.rendezvous import own_address

NETWORK = "network to the head"
"""Name of the check that fails on every other node if the head's network does."""
LIMIT_S = 20.0
"""Time limit of a connection to the head (s)."""
_LARGEST = 4096


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The canary: a file that the head writes into the shared folder. Produced by `offered`."""

    host: str
    address: str
    """Of the head, as the other nodes reach it."""
    port: int
    word: str
    """Drawn for each call; whoever connects to the port gets it. It is no secret."""


@contextlib.contextmanager
def offered(file: Path, others: Sequence[str]) -> Iterator[Head]:
    """Write the canary and answer connections with its word until the context ends. others: names of nodes.

    Raises OSError for a file that cannot be written.
    """
    address = _address_towards(others[0]) if others else "127.0.0.1"
    family = socket.AF_INET6 if ":" in (address or "") else socket.AF_INET
    server = socket.create_server((address or "", 0), family=family, backlog=1024)
    head = Head(
        host=socket.gethostname(),
        address=address or socket.gethostname(),
        port=server.getsockname()[1],
        word=secrets.token_hex(16),
    )
    answering = threading.Thread(target=_answer, args=(server, head.word.encode()), daemon=True)
    try:
        write_durably(file, msgspec.json.encode(head))
        answering.start()
        yield head
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        server.close()


def head_checks(file: Path) -> list[Check]:
    """Whether this node sees the canary, and reaches the head that wrote it."""
    name, remedy = "shared folder", "put output_dir on a file system that all nodes mount under the same path"
    expected = f"{file}, which the head has written"
    try:
        with open(file, "rb") as opened:
            head = msgspec.json.decode(opened.read(_LARGEST), type=Head)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or str(error)
        seen = failed(name, expected=expected, found=found, remedy=remedy)
        return [seen, skipped(NETWORK, "the head's address is in that file")]
    return [ok(name, f"the file of {head.host}"), _network(head)]


def _network(head: Head) -> Check:
    place, expected = f"{head.address} port {head.port}", f"an answer of {head.host}"
    remedy = "see whether a firewall, or another route than the cluster's network, lies between the nodes"
    try:
        with socket.create_connection((head.address, head.port), timeout=LIMIT_S) as connection:
            found = _received(connection, len(head.word))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return failed(NETWORK, expected=expected, found=f"{place}: {why}", remedy=remedy)
    if found != head.word.encode():
        return failed(NETWORK, expected=expected, found=f"{place}: another program answers", remedy=remedy)
    return ok(NETWORK, f"{place} answers")


def _received(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes, fewer at the end of the stream."""
    found = b""
    while len(found) < count and (part := connection.recv(count - len(found))):
        found += part
    return found


def _answer(server: socket.socket, word: bytes) -> None:
    """Ends when the server is shut down."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):  # the peer is gone
            connection.settimeout(LIMIT_S)
            connection.sendall(word)


def _address_towards(other: str) -> str | None:
    """This node's address on the route to another one, None where its name says nothing here."""
    try:
        return own_address(other)
    except (OSError, UnicodeError):
        return None

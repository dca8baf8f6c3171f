"""Messages between the controller and the agents of engines on other hosts. `distributed.sockets` has the connection.

    agent                          controller
    Hello           ------------>
                    <------------  Welcome, or Refused: exit
    Up              ------------>
    Exited          ------------>  (the server ended)
                    <------------  Stop (end the server)

A message is one frame of at most LONGEST bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from megatron_scalerl.distributed import sockets
from megatron_scalerl.distributed.sockets import Buffer, Ping, Refused, decode

LONGEST = 1 << 17
"""Bytes of the longest message. ZeroMQ closes the connection of a peer that sends a longer one."""
REASON_CHARACTERS = 1_000
"""Of a reason."""
_NAME = r"^(engine-[0-9]{1,6}|extra-[A-Za-z0-9._-]{1,64})$"
_URL = r"^https://(\[[0-9A-Fa-f:.%a-z]{2,64}\]|[0-9.]{7,15}):[0-9]{1,5}$"

JOINING = "extra-"
"""Names of engines that the controller did not start begin so; those of the others are engine-N."""


class Hello(sockets.Hello, tag=True, frozen=True, kw_only=True):
    """Agent to controller: first message."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    """engine-N of an engine that the controller starts, extra-... of one that joins."""
    start: str
    """Identifies this start of the engine, as the controller chose it; empty for an engine that joins."""
    host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,255}$")]
    """Name of the agent's host."""
    devices: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Devices of the engine."""


class Welcome(sockets.Welcome, tag=True, frozen=True, kw_only=True):
    """Controller to agent: accepted, start the server."""

    certificate: str
    """PEM, for TLS."""
    key: str
    """PEM; secret."""
    transport: str
    """Of the weights: gloo or nccl."""


class Up(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Agent to controller: the server is up."""

    url: Annotated[str, msgspec.Meta(pattern=_URL)]
    """https://ADDRESS:PORT"""


class Exited(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Agent to controller: there is no server, and the agent exits next."""

    code: Annotated[int, msgspec.Meta(ge=-256, le=256)] | None = None
    """Exit code of the server, negative for a signal; None if it was not started."""
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS)] = ""
    """Why it was not started."""


class Stop(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Controller to agent: end the server and exit with 0."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once."""


ToAgent = Welcome | Refused | Ping | Stop
ToController = Hello | Up | Exited

_to_agent = msgspec.msgpack.Decoder(ToAgent)
_to_controller = msgspec.msgpack.Decoder(ToController)


def not_started(error: Exception) -> str:
    """The reason that an agent reports for a server that it could not start."""
    return f"did not start: {' '.join(str(error).split())}"[:REASON_CHARACTERS]


def decode_for_agent(frames: Sequence[Buffer]) -> ToAgent:
    """A message of the controller. Raises InvalidMessage for anything else."""
    return decode(_to_agent, frames)


def decode_for_controller(frames: Sequence[Buffer]) -> ToController:
    """A message of an agent. Raises InvalidMessage for anything else."""
    return decode(_to_controller, frames)

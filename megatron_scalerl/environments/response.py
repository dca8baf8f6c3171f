"""Defines the inputs of an environment: the policy's response in a turn, and an agent's access to the policy."""

from typing import Any

from megatron_scalerl.record import record

ROUTE_HEADER = "X-Route-Key"
Message = dict[str, Any]
"""A chat message: role, content, and further keys that the policy's chat template reads."""


@record
class ToolCall:
    """A tool call in the policy's text. Produced by `rollouts.decoder`."""

    name: str = ""
    """Name of the tool; empty if the call has none."""
    arguments: Any = None
    """The arguments, decoded from JSON."""
    raw: str = ""
    """The text of the call."""
    error: str = ""
    """The reason why the call cannot be read, in one word; empty for a readable call. The environment
    also gets unreadable calls, to answer with an error message."""
    id: str = ""
    """The call's id, which the tool's answer repeats as `tool_call_id`; empty if the policy's format has no ids."""


@record
class Response:
    """The policy's answer in one turn. Produced by `rollouts.episodes`."""

    text: str
    """The text after thinking, without special tokens; empty if thinking did not end."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls in `text`, in order; the text of each call stays in `text`."""


@record
class Agent:
    """The address and key with which an agent asks the policy in one episode. Produced by `rollouts.agents`."""

    base_url: str
    """Base URL for a client of OpenAI's chat completions, http://127.0.0.1:PORT/v1."""
    api_key: str
    """Secret key for this episode's requests, valid until the agent's method `run` ends."""
    model: str
    """Name of the model that the agent has to send in requests; equal in all runs."""
    route_key: str = ""
    """Value of the header ROUTE_HEADER for a client that serves many episodes.

    The client sends each episode's `api_key` as cache_salt in the body of a request.
    """

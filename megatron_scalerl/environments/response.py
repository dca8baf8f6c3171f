"""Inputs of an environment: the policy's response in a turn, or an agent's access to the policy."""

from typing import Any

from megatron_scalerl.record import record

ROUTE_HEADER = "X-Route-Key"
Message = dict[str, Any]
"""A message of a chat: role, content, and further keys that the policy's chat template reads."""


@record
class ToolCall:
    """A call of a tool in the policy's text. Produced by `rollouts.decoder`."""

    name: str = ""
    """Name of the tool; empty if the call has none."""
    arguments: Any = None
    """The arguments, decoded from JSON."""
    raw: str = ""
    """The text of the call."""
    error: str = ""
    """The reason why the call cannot be read, in one word; empty for a readable call. The environment answers a
    call with an error."""
    id: str = ""
    """The id that the format gives the call, for `tool_call_id`; empty for most formats."""


@record
class Response:
    """The policy's answer in one turn. Produced by `rollouts.episodes`."""

    text: str
    """The text after thinking, without special tokens; empty if thinking did not end."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools, in their order in `text`, which still contains the calls."""


@record
class Agent:
    """The access of a class with `run` to the policy, for one episode. Produced by `rollouts.agents`."""

    base_url: str
    """URL of the chat completions, http://127.0.0.1:PORT/v1."""
    api_key: str
    """Key of this episode alone, valid until the episode ends."""
    model: str
    """Name for requests, the same in every run."""
    route_key: str = ""
    """Value of ROUTE_HEADER for a client of many episodes, which sends `api_key` in the body as cache_salt."""
